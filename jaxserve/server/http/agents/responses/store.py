"""Responses that later requests name, bounded in bytes and age."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jaxserve.errors import JaxserveError
from jaxserve.server.http.json import dumps

MAX_SHELVES = 128  # of tokens; what others make is kept together
SHARED: Final = None  # key of the shelf of these


class NotStoredError(JaxserveError):
    """No response of this id is stored for whoever asks."""

    code = "NOT_FOUND"
    http_status = 404
    reason = "RESPONSE_NOT_FOUND"

    def __init__(self, id: str):
        super().__init__(
            f"the response {id!r:.80} is not stored here: it was not kept (store: false, or it "
            f"failed), was dropped for its age or for others (--stored-response-seconds, "
            f"--max-stored-response-bytes), belongs to another token, or the server has restarted "
            f"since; send the conversation itself as input"
        )


@dataclass(frozen=True)
class Stored:
    """A response that is kept.

    `response` is the JSON text of the response, and `items` has those of the items of its whole
    input and its output. `inputs` is how many of them are input.
    """

    response: bytes
    items: Sequence[bytes]
    inputs: int
    token: str  # of the client who may see it
    since: float  # seconds on the store's clock

    @property
    def size(self) -> int:
        """Bytes that the response takes at the most: a chain of responses shares its items."""
        return len(self.response) + self.conversation_size

    @property
    def conversation_size(self) -> int:
        """Bytes of the items."""
        return sum(map(len, self.items))

    def conversation(self) -> list[Any]:
        """Return the items of the input and the output, in their order."""
        return [json.loads(item) for item in self.items]

    def input_items(self) -> list[Any]:
        """Return the items of the input."""
        return [json.loads(item) for item in self.items[: self.inputs]]


@dataclass
class _Shelf:
    """Responses by their ids, the oldest first."""

    kept: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    size: int = 0  # bytes

    def put(self, id: str, stored: Stored) -> None:
        self.kept[id] = stored
        self.size += stored.size

    def drop(self, id: str) -> None:
        self.size -= self.kept.pop(id).size

    def drop_oldest(self) -> None:
        self.drop(next(iter(self.kept)))

    def drop_older_than(self, since: float) -> None:
        while self.kept and next(iter(self.kept.values())).since < since:
            self.drop_oldest()


class ResponseStore:
    """Responses, each for the token that made it.

    Lives on the event loop, and ends with the process.

    Args:
        max_bytes: Most bytes of all responses. Where there is no room the oldest ones go of the
            token that has most.
        seconds: Age at which a response is dropped.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._shelves: dict[str | None, _Shelf] = {}  # by token

    def put(self, response: Mapping[str, Any], inputs: Sequence[bytes], token: str) -> None:
        """Keep a response; one that alone is larger than all may be is not kept.

        Args:
            inputs: JSON texts of the items of its whole input.
        """
        items = (*inputs, *map(dumps, response["output"]))
        stored = Stored(dumps(response), items, len(inputs), token, self._clock())
        if stored.size > self._max_bytes:
            return
        self._drop_old()
        # Without --token-file a client may send any number of tokens.
        has_shelf = token in self._shelves or len(self._shelves) < MAX_SHELVES
        shelf = self._shelves.setdefault(token if has_shelf else SHARED, _Shelf())
        shelf.put(response["id"], stored)
        while sum(shelf.size for shelf in self._shelves.values()) > self._max_bytes:
            max(self._shelves.values(), key=lambda shelf: shelf.size).drop_oldest()

    def get(self, id: str, token: str) -> Stored:
        """Return the response of this id and token; NotStoredError where there is none."""
        return self._shelf_of(id, token).kept[id]

    def delete(self, id: str, token: str) -> None:
        """Drop a response; NotStoredError where there is none of this id and token."""
        self._shelf_of(id, token).drop(id)

    def _shelf_of(self, id: str, token: str) -> _Shelf:
        self._drop_old()
        for key in (token, SHARED):
            shelf = self._shelves.get(key)
            if shelf and id in shelf.kept and shelf.kept[id].token == token:
                return shelf
        raise NotStoredError(id)

    def _drop_old(self) -> None:
        """Drop responses that have been kept for too long, and tokens that have none left."""
        for shelf in self._shelves.values():
            shelf.drop_older_than(self._clock() - self._seconds)
        self._shelves = {token: shelf for token, shelf in self._shelves.items() if shelf.kept}
