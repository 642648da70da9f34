"""List the input items of a stored response, page by page."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError

MOST = 100  # items of a page, as OpenAI has it
USUAL = 20
ORDERS = ("asc", "desc")


def listing(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of items in OpenAI's form.

    The query has `limit`, `order` (desc by default) and `after`, the id of the item before the
    page. RequestError for other values.
    """
    limit = _limit(query.get("limit"))
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise RequestError("order", f"is {order!r:.80}; it must be asc or desc")
    ordered = items if order == "asc" else items[::-1]
    start = _start(ordered, query.get("after"))
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": list(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }


def _limit(text: str | None) -> int:
    if text is None:
        return USUAL
    limit = int(text) if re.fullmatch(r"[0-9]{1,3}", text, re.ASCII) else 0
    if not 1 <= limit <= MOST:
        raise RequestError("limit", f"is {text!r:.80}; it must be a number from 1 to {MOST}")
    return limit


def _start(items: Sequence[Mapping[str, Any]], after: str | None) -> int:
    """Return the position behind the item of this id."""
    if after is None:
        return 0
    for i, item in enumerate(items):
        if item["id"] == after:
            return i + 1
    raise RequestError("after", f"is {after!r:.80}, which is the id of no item")
