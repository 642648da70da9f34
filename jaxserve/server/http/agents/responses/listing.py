"""List the input items of a stored response, page by page."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError

MOST = 100  # items of a page, as OpenAI has it
USUAL = 20
ORDERS = ("asc", "desc")


def listing(items: Sequence[Any], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of items in OpenAI's form.

    The query has `limit`, `order` (desc by default) and `after`, the id of the item before the
    page. RequestError for other values.
    """
    limit = _limit(query.get("limit"))
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise RequestError("order", f"is {order!r:.80}; it must be asc or desc")
    listed = [_with_id(item, i) for i, item in enumerate(items)]
    if order == "desc":
        listed.reverse()
    start = _start(listed, query.get("after"))
    page = listed[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(listed),
    }


def _limit(text: str | None) -> int:
    if text is None:
        return USUAL
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= MOST):
        raise RequestError("limit", f"is {text!r:.80}; it must be a number from 1 to {MOST}")
    return int(text)


def _start(items: Sequence[Mapping[str, Any]], after: str | None) -> int:
    """Return the position behind the item of this id."""
    if after is None:
        return 0
    for i, item in enumerate(items):
        if item["id"] == after:
            return i + 1
    raise RequestError("after", f"is {after!r:.80}, which is the id of no item")


def _with_id(item: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return an item with the fields that clients may leave out: type, id, and parts of a text."""
    found = {"type": "message", "id": f"item_{index}"} | {
        name: value for name, value in item.items() if value is not None
    }
    if found["type"] == "message" and isinstance(found.get("content"), str):
        kind = "output_text" if found.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": found["content"]}]
    return found
