"""Series of /metrics: what clients send must not make new ones."""

import re

import httpx

from jaxserve.client.errors import BY_REASON

REASON = re.compile(r'\{reason="(\w+)"\}')


async def series(http: httpx.AsyncClient) -> frozenset[str]:
    """Return the names and labels of all series of a server."""
    text = (await http.get("/metrics")).raise_for_status().text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return frozenset(line.rsplit(" ", 1)[0] for line in lines)


def unbounded(new: frozenset[str]) -> list[str]:
    """Return those of some new series that are no reason of jaxserve's errors.

    These are as many as there are classes; a rare one may come late.
    """
    found = ((name, REASON.search(name)) for name in sorted(new))
    return [name for name, reason in found if not reason or reason[1] not in BY_REASON]
