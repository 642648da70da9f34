"""Messages of gRPC calls that have begun and have not come: their time, and their number."""

import asyncio
from collections.abc import AsyncIterable

from jaxserve.errors import QueueFullError
from jaxserve.server.grpc.errors import MessageError, SlowSenderError

MAX_AWAITED = 32  # calls without a token whose message has not come
RETRY_SECONDS = 1.0


class AwaitedMessages:
    """Messages that have not come. Lives on the event loop.

    gRPC holds what has come of each, up to --max-message-bytes, and no handler can count it.

    Args:
        seconds: Seconds in which a message has to come.
        most: Number of messages that are awaited at a time; a further one ends the call that has
            waited longest. Of calls without a token: a health check comes whole, and waits for a
            turn of the event loop or two.
    """

    def __init__(self, seconds: float, most: int | None = None):
        self._seconds = seconds
        self._most = most
        self._scopes = dict[asyncio.Timeout, None]()  # in the order in which they began

    async def next_of(self, messages: AsyncIterable[bytes]) -> bytes:
        """Wait for the next message.

        Raises:
            MessageError: There is none.
            SlowSenderError: It does not come in time.
            QueueFullError: Too many others are awaited.
        """
        if len(self._scopes) == self._most:
            self._end(next(iter(self._scopes)))
        scope = asyncio.timeout(self._seconds)
        try:
            async with scope:
                self._scopes[scope] = None
                return await anext(aiter(messages))
        except StopAsyncIteration:
            raise MessageError("the call has no message") from None
        except TimeoutError:
            if scope not in self._scopes:
                problem = (
                    f"{self._most} calls wait for their message already, and this one has waited "
                    "longest"
                )
                raise QueueFullError(problem, RETRY_SECONDS) from None
            problem = f"the message did not come within {self._seconds:g} s (--slow-client-seconds)"
            raise SlowSenderError(problem) from None
        finally:
            self._scopes.pop(scope, None)

    def _end(self, scope: asyncio.Timeout) -> None:
        del self._scopes[scope]
        if not scope.expired():  # one that has is about to end by itself
            scope.reschedule(-1)  # a time in the past: the scope times out at once
