"""Checks of a request's values, which turn what clients give into plain Python types.

Every function raises RequestError, with the given name as its field, for what it cannot take.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real

from jaxserve.errors import RequestError


def number(name: str, value: object, low: float, high: float) -> float:
    """Return `value` as a finite float between `low` and `high`; otherwise raise RequestError."""
    found = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:  # an int of more than 1,024 bits
            found = math.inf
    if not math.isfinite(found):
        raise RequestError(name, f"is {value!r:.80}; it must be a finite number")
    if not low <= found <= high:
        raise RequestError(name, f"is {value}; it must be between {low} and {high}")
    return found


def count(name: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int between `low` and `high`; otherwise raise RequestError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(name, f"is {value!r:.80}; it must be an integer")
    if not low <= int(value) <= high:
        raise RequestError(name, f"is {value}; it must be between {low} and {high}")
    return int(value)


def _entries(name: str, values: object, what: str) -> Iterable[object]:
    """Return `values` if they are a list of some kind; text and mappings are none.

    Iterables other than lists pass, too: a range, a tuple or a NumPy array of ids is as good.
    """
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        raise RequestError(name, f"is {values!r:.80}; give a list of {what}")
    return values


def integers(name: str, values: object, limit: int | None = None) -> tuple[int, ...]:
    """Return a list of integers of any type as plain ints; otherwise raise RequestError.

    `name` is the field for the error, `limit` the highest allowed number of entries.
    """
    ids = tuple(_entries(name, values, "token ids"))
    # The number is checked first: each entry of a list of millions would cost time.
    if limit is not None and len(ids) > limit:
        raise RequestError(name, f"has {len(ids)} ids; the limit is {limit}")
    if set(map(type, ids)) <= {int}:  # plain ones, which may be very many
        return ids  # type: ignore[return-value]
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(
                name, f"has {token!r:.80} as entry {position}; it must be an integer"
            )
    return tuple(map(int, ids))  # type: ignore[call-overload]


def strings(name: str, values: object, limit: int, max_bytes: int) -> tuple[str, ...]:
    """Return a string, or a list of them, as a tuple; otherwise raise RequestError.

    `limit` is the highest allowed number of strings. Each has 1 to `max_bytes` bytes of UTF-8.
    """
    if isinstance(values, str):
        values = [values]
    texts = tuple(_entries(name, values, "strings"))
    if len(texts) > limit:
        raise RequestError(name, f"has {len(texts)} strings; the limit is {limit}")
    for position, text in enumerate(texts):
        try:
            size = len(text.encode("utf-8")) if isinstance(text, str) else 0
        except UnicodeEncodeError:
            raise RequestError(
                name, f"has {text!r} as entry {position}, which is not valid Unicode"
            ) from None
        if not 1 <= size <= max_bytes:
            found = f"has {text!r:.80} as entry {position}"
            raise RequestError(name, f"{found}; it must be a string of 1 to {max_bytes} bytes")
    return texts  # type: ignore[return-value]


def biases(name: str, values: object, limit: int) -> dict[int, float]:
    """Return the logit biases with plain ints and floats; otherwise raise RequestError.

    `limit` is the highest allowed number of entries.
    """
    if not isinstance(values, Mapping):
        raise RequestError(name, f"is {values!r:.80}; give a mapping of token ids to numbers")
    if len(values) > limit:
        raise RequestError(name, f"has {len(values)} entries; the limit is {limit}")
    ids = integers(name, list(values))
    return {
        token: number(f"{name}[{token}]", bias, -100.0, 100.0)
        for token, bias in zip(ids, values.values(), strict=True)
    }


def check_token_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise RequestError for the first id that is not in 0 to vocab_size - 1."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            known = f"the vocabulary has ids 0 to {vocab_size - 1}"
            raise RequestError(name, f"has {token} as entry {position}; {known}")
