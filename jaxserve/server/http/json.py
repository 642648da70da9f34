"""JSON as it goes over HTTP: strict on the way in, never failing on the way out."""

import json
from typing import Any, NoReturn


def dumps(value: Any) -> bytes:
    """One line of UTF-8. Half a surrogate pair, which a client may have sent, is written as an
    escape.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def loads(data: bytes) -> Any:
    """ValueError for what is not JSON, NaN and Infinity among it, and for a name given twice in one
    object.
    """
    return json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_unique)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is given twice")
        found[name] = value
    return found
