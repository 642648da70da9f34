"""Read the bodies of agents: as listed objects, within a number of values, with a deadline."""

import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Listed, Notes, parsed
from jaxserve.server.http.body import read_object, timeout_of
from jaxserve.server.serving_state import ServingState

# Members of all objects and lists of a body: reading one takes microseconds of the event loop. A
# long session of an agent has some ten thousand.
MAX_VALUES = 2**16


@dataclass(frozen=True)
class ReadRequest[T: Listed]:
    """Body of a request, what of it has no effect, and the seconds that its client still waits."""

    body: T
    notes: Notes
    timeout: float | None


async def read_listed[T: Listed](
    request: Request, kind: type[T], limits: Limits, served: ServingState
) -> ReadRequest[T]:
    """Read the body as a `kind`; JaxserveError when it is anything else, or too large."""
    timeout = timeout_of(request)
    began = time.monotonic()
    given = await read_object(request, limits)
    check_values(given)
    notes = Notes(served.service.prompts.chat.unknown_fields)
    body = parsed(kind, given, notes)
    if timeout is not None:
        timeout -= time.monotonic() - began
    return ReadRequest(body, notes, timeout)


def check_values(given: dict[str, Any]) -> None:
    """Raise RequestError, named after a field, for a body of more than MAX_VALUES values."""
    total = 0
    for name, value in given.items():
        total += 1 + _values(value, MAX_VALUES - total)
        if total > MAX_VALUES:
            problem = f"has too many objects and values; the limit of a request is {MAX_VALUES}"
            raise RequestError(f"{name:.80}", problem)


def _values(value: Any, most: int) -> int:
    """Return the number of values inside of one, or any number above `most`."""
    found = 0
    inside = [value]
    while inside and found <= most:
        each = inside.pop()
        if isinstance(each, dict):
            found += len(each)
            inside += each.values()
        elif isinstance(each, list):
            found += len(each)
            inside += each
    return found
