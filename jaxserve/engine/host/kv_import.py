"""Installing a prompt's pages that another engine computed in the prefix cache of this one.

kv_transfer.py draws the way that pages take. Installed ones are idle pages of the prefix cache: no
sequence holds them, and pages that find no room are not installed. A request that is admitted later
computes whatever is not cached, so that a transfer that fails costs time and nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.config.kv_policy import StateSlots
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE, split_pages
from jaxserve.engine.host.kv_export import PagesToSend
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.page_device import Arrays, PageDevice
from jaxserve.engine.host.prefix_cache import HashedPrompt
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import DeadlineError


@dataclass(frozen=True)
class StagedPages:
    """Whole pages of one group that lie on the devices and are to be installed."""

    group: int
    pages: range  # of the prompt
    uploaded: Any


class KVImport:
    """Brings pages of one prompt into the prefix cache of one lane.

    Args:
        cached: Number of tokens of the prompt that a request would have found in the lane when the
            import began.
    """

    def __init__(
        self,
        lane: Lane,
        prompt: HashedPrompt,
        cached: int,
        config: EngineConfig,
        device: PageDevice,
        slots: BoundedSemaphore,
    ):
        self.cached = cached
        self.installed = 0  # pages that were added to the cache, over all groups
        self._lane = lane
        self._prompt = prompt
        self._config = config
        self._device = device
        self._slots = slots
        # The part of a page that the last segment ended with, by group: its rest may come next.
        self._tails: dict[int, KVSegment] = {}

    def stage(self, segment: KVSegment, timeout: float) -> Iterator[StagedPages]:
        """Upload the whole pages that the segment completes, and yield them part by part.

        Each part takes a slot on the devices until the next one is asked for. One thread at a time
        may stage; it need not be the engine's.

        Args:
            timeout: Seconds to wait for a slot.

        Raises:
            DeadlineError: No slot came free in that time.
            ConfigError, EngineError: The segment cannot become pages of this engine.
        """
        self._device.check_segment(segment)
        if isinstance(self._config.policies[segment.group], StateSlots):
            pages = self._page_of_state(segment)
            arrays = segment.arrays
            size = 1
        else:
            pages, arrays = self._whole_pages(segment)
            size = self._config.page_size
        done = 0
        for count in split_pages(len(pages), self._config):
            part = {name: x[:, done * size : (done + count) * size] for name, x in arrays.items()}
            with self._slot(timeout):
                uploaded = self._device.upload_pages(segment.group, part)
                yield StagedPages(segment.group, pages[done : done + count], uploaded)
            done += count

    def move(self, outgoing: PagesToSend, timeout: float) -> Iterator[StagedPages]:
        """Copy pages from devices of the same process, without passing through the host.

        Both engines must shard and store pages alike (PageStore.transfer_format). Threads, slots
        and timeout are those of `stage`; raises EngineError if the pages were taken or dropped
        before.
        """
        with self._slot(timeout):
            yield StagedPages(outgoing.group, outgoing.pages, outgoing.move_to(self._device))

    @contextmanager
    def _slot(self, timeout: float) -> Iterator[None]:
        if not self._slots.acquire(timeout=timeout):
            raise DeadlineError(
                f"{SEGMENTS_ON_DEVICE} KV segments were on the devices for {timeout:g} s, "
                f"and no more may be there at once"
            )
        try:
            yield
        finally:
            self._slots.release()

    def _whole_pages(self, segment: KVSegment) -> tuple[range, Arrays]:
        """Return the pages of the prompt that the segment completes, and their contents.

        What comes behind the last whole page is kept for the next segment.
        """
        size = self._config.page_size
        segment = self._joined(segment)
        useful = len(self._prompt.chains[segment.group].digests)
        first = -(-segment.start // size)
        stop = min(segment.stop // size, useful)
        if first > stop:
            return range(0), {}
        if stop < useful and stop * size < segment.stop:
            # A copy, since a view would keep the whole segment in memory.
            rest = {
                name: x[:, stop * size - segment.start :].copy()
                for name, x in segment.arrays.items()
            }
            self._tails[segment.group] = KVSegment(segment.group, stop * size, **rest)
        begin = first * size - segment.start
        end = stop * size - segment.start
        return range(first, stop), {name: x[:, begin:end] for name, x in segment.arrays.items()}

    def _page_of_state(self, segment: KVSegment) -> range:
        """Return the page that a state ends with; none if it stands within a page or too far."""
        end, behind = divmod(segment.stop, self._config.page_size)
        useful = len(self._prompt.chains[segment.group].digests)
        return range(end - 1, end) if not behind and end <= useful else range(0)

    def _joined(self, segment: KVSegment) -> KVSegment:
        """Return the segment with the rest of the one before it, if it continues there."""
        tail = self._tails.pop(segment.group, None)
        if tail is None or tail.stop != segment.start or tail.k.dtype != segment.k.dtype:
            return segment
        both = {
            name: np.concatenate([tail.arrays[name], x], axis=1)
            for name, x in segment.arrays.items()
        }
        return KVSegment(segment.group, tail.start, **both)

    def install(self, staged: StagedPages) -> int:
        """Write the pages and make them findable; return how many of them are new here.

        Runs on the engine's thread. 0 if a page before them is missing, fewer than staged if the
        pool has no more pages that no sequence holds.
        """
        group = staged.group
        chain = self._prompt.chains[group]

        def write(ids: list[int]) -> None:
            self._device.write_pages(self._lane.index, group, ids, staged.uploaded)

        new = self._lane.adopt(group, self._prompt.tokens, chain, staged.pages, write)
        self.installed += new
        return new
