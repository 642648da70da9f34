"""Transfers of KV pages between the prefix caches of engines: an engine's exports and imports.

    here   KVExport: after a step, what it published is read -> PagesToSend.to_host() -> KVSegment
    there  KVSegment -> KVImport.stage(): uploaded -> KVImport.install(): written and published

Between two meshes of one process, KVImport.move() takes PagesToSend itself, and nothing passes
through the host.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import BoundedSemaphore

from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE
from jaxserve.engine.host.kv_export import KVExport, PagesToSend, wanted_pages
from jaxserve.engine.host.kv_import import KVImport
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.page_device import PageDevice
from jaxserve.engine.host.prefix_cache import DigestChain, HashedPrompt
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.errors import ConfigError, EngineError
from jaxserve.request import Request


class KVTransfers:
    """Exports of an engine that are under way, and the start of imports.

    Methods run on the engine's thread.

    Args:
        device: Reader and writer of pages; None if the engine exchanges none.
    """

    def __init__(self, scheduler: Scheduler, device: PageDevice | None):
        # One slot for each segment that was read and is not on the host yet, or that was uploaded
        # and is not written yet: they bound the device memory that transfers take.
        self.slots = BoundedSemaphore(SEGMENTS_ON_DEVICE)
        self._config = scheduler.config
        self._device = device
        self._scheduler = scheduler
        self._lanes = scheduler.lanes
        self._exports: list[KVExport] = []

    def export(
        self,
        request: Request,
        start: int,
        page_size: int,
        deliver: Callable[[PagesToSend | None], None],
    ) -> KVExport:
        """Read the pages of a prompt that another engine lacks, now and after each step.

        Args:
            request: Request that is running, or was not submitted at all; then only cached pages
                are read.
            start: Number of tokens of the prompt that the other engine has.
            page_size: Page size of the other engine.
            deliver: Function called on this thread with each part, in the order of the prompt
                within each page group, and at last with None; it must neither block nor raise.

        Raises:
            ConfigError: The engine exchanges no pages.
        """
        if start < 0 or page_size < 1:
            raise EngineError(
                f"an export was asked for from token {start} on, to pages of {page_size} tokens; "
                f"they must be at least 0 and 1"
            )
        if self._config.states and page_size != self._config.page_size:
            raise EngineError(
                f"an export was asked for to pages of {page_size} tokens; with recurrent states "
                f"they must have as many as here, {self._config.page_size}"
            )
        pages = wanted_pages(self._config, len(request.prompt), start, page_size)
        length = max(part.stop for part in pages) * self._config.page_size
        prompt = self._hashed(request.prompt, request.salt, length)
        device = self._page_device()
        computing = partial(self._scheduler.has, request.id)
        export = KVExport(
            self._config, self._lanes, device, self.slots, prompt, pages, computing, deliver
        )
        self._exports.append(export)
        try:
            self.advance()
        except BaseException:
            self.close(export)
            raise
        return export

    def receive(self, tokens: Sequence[int], salt: str = "") -> KVImport:
        """Begin to import pages of this prompt into the lane that has most of them.

        Raises ConfigError if the engine exchanges no pages.
        """
        prompt = self._hashed(tokens, salt, len(tokens) - 1)
        lane = max(
            self._lanes, key=lambda lane: (self._cached(lane, prompt), lane.available_pages())
        )
        cached = self._cached(lane, prompt)
        return KVImport(lane, prompt, cached, self._config, self._page_device(), self.slots)

    def advance(self) -> None:
        """Go on with every export: after each step, and whenever a slot was given back.

        Sliding windows and states go first, those of all exports: these few are the first to be
        evicted, and nothing of a prompt is of use without them.
        """
        for export in list(self._exports):
            export.read_indispensable()
        for export in list(self._exports):
            # Delivering may have closed other exports.
            if export in self._exports and export.advance():
                self.close(export)
                export.end()

    def close(self, export: KVExport) -> None:
        """Read nothing more for the export; what was delivered stays its receiver's.

        Does nothing if the export has ended.
        """
        if export in self._exports:
            self._exports.remove(export)

    def _page_device(self) -> PageDevice:
        if self._device is None:
            raise ConfigError(
                "this engine exchanges no pages with others "
                "(build it with EngineOptions.page_exchange)"
            )
        return self._device

    def _hashed(self, tokens: Sequence[int], salt: str, length: int) -> HashedPrompt:
        """Return the prompt with the digests of its first `length` tokens, in every page group."""
        prompt = HashedPrompt(list(tokens), [DigestChain() for _ in self._config.pools])
        # Digests do not depend on the lane.
        self._lanes[0].prefixes.extend_chains(prompt.chains, prompt.tokens, salt, length)
        return prompt

    def _cached(self, lane: Lane, prompt: HashedPrompt) -> int:
        """Return how many tokens of the prompt a request would find in the lane."""
        pages = lane.prefixes.cached(prompt.tokens, prompt.chains)[0]
        return len(pages) * self._config.page_size
