"""Responses that later requests name, bounded in bytes and age."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.server.http.json import dumps


class NotStoredError(JaxserveError):
    """No response of this id is stored for whoever asks."""

    code = "NOT_FOUND"
    http_status = 404
    reason = "RESPONSE_NOT_FOUND"

    def __init__(self, id: str):
        super().__init__(
            f"the response {id!r:.80} is not stored here: it was not kept (store: false), was "
            f"dropped for its age or for others (--stored-response-seconds, "
            f"--max-stored-response-bytes), belongs to another token, or the server has restarted "
            f"since; send the conversation itself as input"
        )


@dataclass(frozen=True)
class Stored:
    """A response that is kept.

    `response` and `items`, its whole input with its output, are JSON texts. `inputs` is how many of
    the items are input. `token` is that of the client who may see it.
    """

    response: bytes
    items: bytes
    inputs: int
    token: str
    since: float  # seconds on the store's clock

    @property
    def size(self) -> int:
        """Bytes that the response takes."""
        return len(self.response) + len(self.items)

    @property
    def conversation(self) -> list[Any]:
        """Items of the input and the output, in their order."""
        return json.loads(self.items)


class ResponseStore:
    """Responses by their ids. Lives on the event loop, and ends with the process.

    Args:
        max_bytes: Most bytes of all responses; the oldest go first.
        seconds: Age at which a response is dropped.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._kept = OrderedDict[str, Stored]()
        self._bytes = 0

    def put(self, response: Mapping[str, Any], inputs: Sequence[Any], token: str) -> None:
        """Keep a response; one that is larger than all may be together is not kept."""
        items = [*inputs, *response["output"]]
        stored = Stored(dumps(response), dumps(items), len(inputs), token, self._clock())
        self._kept[response["id"]] = stored
        self._bytes += stored.size
        self._drop()

    def get(self, id: str, token: str) -> Stored:
        """Return the response of this id and token; NotStoredError where there is none."""
        self._drop()
        stored = self._kept.get(id)
        if stored is None or stored.token != token:
            raise NotStoredError(id)
        return stored

    def delete(self, id: str, token: str) -> None:
        """Drop a response; NotStoredError where there is none of this id and token."""
        self.get(id, token)
        self._bytes -= self._kept.pop(id).size

    def _drop(self) -> None:
        """Drop the oldest responses until all are within the bounds."""
        oldest = self._clock() - self._seconds
        while self._kept:
            first = next(iter(self._kept.values()))
            if self._bytes <= self._max_bytes and first.since >= oldest:
                return
            self._bytes -= self._kept.popitem(last=False)[1].size
