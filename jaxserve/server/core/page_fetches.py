"""Requests whose prompts are computed elsewhere, until their pages have come."""

import asyncio
from typing import Protocol

from jaxserve.request import Request


class PageFetcher(Protocol):
    """Has prompts computed elsewhere, and puts their KV pages into the engine's prefix cache."""

    async def prepare(self, request: Request) -> None:
        """Fetch what can be fetched before the request is submitted.

        Raises JaxserveError when there is no use in submitting the request any more.
        """
        ...

    def close(self) -> None: ...


class PageFetches:
    """The fetches of pages in flight, by the client's request id. Lives on the event loop.

    Their prompts wait elsewhere and come back to be decoded here, so that they count as waiting.

    Args:
        fetcher: Fetcher of pages; None for a server that computes all prompts itself.
    """

    def __init__(self, fetcher: PageFetcher | None):
        self.tokens = 0  # prompt tokens of all that are fetched
        self._fetcher = fetcher
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def fetch(self, request_id: str, request: Request) -> None:
        """Wait until the pages of a prompt are in the prefix cache, or until `cancel`."""
        if self._fetcher is None:
            return
        task = asyncio.create_task(self._fetcher.prepare(request))
        self._tasks[request_id] = task
        self.tokens += len(request.prompt)
        try:
            # asyncio.wait does not raise when the task is cancelled: an aborted request goes on
            # at once, and does not wait for the end of the fetch.
            await asyncio.wait((task,))
        finally:
            del self._tasks[request_id]
            self.tokens -= len(request.prompt)
            task.cancel()
        if not task.cancelled():
            task.result()

    def cancel(self, request_id: str) -> None:
        """Stop waiting for the pages of this request, if it is among them."""
        if task := self._tasks.get(request_id):
            task.cancel()

    def cancel_all(self) -> None:
        """Stop waiting for any pages."""
        for task in self._tasks.values():
            task.cancel()

    def close(self) -> None:
        """Free the fetcher's threads."""
        if self._fetcher:
            self._fetcher.close()
