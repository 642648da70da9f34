"""JSON as HTTP messages carry it: strict when read, never failing when written."""

import json
import math
from typing import Any, NoReturn

MEDIA_TYPE = "application/json"


def dumps(value: Any) -> bytes:
    """Return the value as one line of JSON in UTF-8.

    Half a surrogate pair, which UTF-8 cannot encode and a client may have sent, is written as an
    escape.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def loads(data: bytes) -> Any:
    """Parse JSON in UTF-8.

    ValueError for anything else, for NaN and Infinity, for numbers beyond those of a double, and
    for a name given twice in one object.
    """
    return json.loads(
        data.decode("utf-8"),
        parse_constant=_refuse,
        parse_float=_finite,
        object_pairs_hook=_unique,
    )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.80} is beyond the numbers that can be read")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is given twice")
        found[name] = value
    return found
