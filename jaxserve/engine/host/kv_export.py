"""Reading a prompt's pages for another engine, while the prompt is still being computed.

After each step, the pages that it published are read on the devices and handed out as PagesToSend.
Nothing is reserved for this: pages that are evicted before they could be read are not sent.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import split_pages
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.page_device import PageDevice, PagesRead
from jaxserve.engine.host.prefix_cache import HashedPrompt
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import EngineError


def wanted_pages(config: EngineConfig, tokens: int, start: int, page_size: int) -> list[range]:
    """Return per group the page range of a prompt that a remote engine is missing.

    The ranges count pages of this engine; they are cut so that the remote engine can make whole
    pages of its own from whole pages of this one. The last token is left out, since the remote
    engine computes it itself. A sliding-window group begins with the page that the first token
    computed there attends to; of states only that behind the last page is wanted.

    Args:
        tokens: Length of the prompt.
        start: Number of tokens that the remote engine has already.
        page_size: Page size of the remote engine.
    """
    own = config.page_size
    reach = min(tokens // own * own, tokens - 1) // page_size * page_size
    firsts = [
        max(start, policy.first_seen(reach) // page_size * page_size) // own
        for policy in config.policies
    ]
    stop = config.page_span(reach) if start < reach else 0
    return [range(min(first, stop), stop) for first in firsts]


class PagesToSend:
    """Pages that were read and are still on the devices.

    The receiver must call exactly one of `to_host`, `move_to` and `drop`, on any thread: until
    then the pages take one of the slots that bound how much lies on the devices.

    Args:
        pages: Range within the prompt, in pages of the engine that has read them.
        start: Position of the first token, as in KVSegment.
    """

    def __init__(
        self, group: int, pages: range, start: int, read: PagesRead, slots: BoundedSemaphore
    ):
        self.group = group
        self.pages = pages
        self.start = start
        self.nbytes = read.nbytes  # of keys and values, each counted once
        self._read: PagesRead | None = read
        self._slots = slots
        self._lock = Lock()

    def start_to_host(self) -> None:
        """Start the copy to the host, so that `to_host` waits for less; returns at once.

        Does nothing if the pages were taken or dropped.
        """
        if read := self._read:
            read.start_to_host()

    def to_host(self) -> KVSegment:
        """Wait for the devices; raise EngineError if the pages were taken or dropped before."""
        with self._taken() as read:
            return KVSegment(self.group, self.start, **read.to_host())

    def move_to(self, device: PageDevice) -> Any:
        """Copy the pages to other devices and wait for it, see PageDevice.move_pages.

        Raises EngineError if the pages were taken or dropped before.
        """
        with self._taken() as read:
            return device.move_pages(self.group, read)

    @contextmanager
    def _taken(self) -> Iterator[PagesRead]:
        read = self._take()
        if read is None:
            raise EngineError(
                f"the segment at token {self.start} of page group {self.group} was taken or "
                f"dropped before"
            )
        try:
            yield read
        finally:
            self._slots.release()

    def drop(self) -> None:
        """Give the pages up; does nothing if they were taken or dropped before."""
        if self._take():
            self._slots.release()

    def _take(self) -> PagesRead | None:
        with self._lock:
            read = self._read
            self._read = None
        return read


class KVExport:
    """Reads pages of one prompt: cached ones now, the others as its request publishes them.

    Pages are delivered in the order of the prompt within each group, and None at the end. The
    export ends when all were delivered, or when the request has ended and what is missing cannot be
    found any more, or would be of no use. All methods run on the engine's thread.

    Args:
        slots: Semaphore of which one slot is taken for every delivery, and given back by its
            receiver.
        pages: Page range to read, per group.
        computing: Function that returns whether the request is still running.
    """

    def __init__(
        self,
        config: EngineConfig,
        lanes: Sequence[Lane],
        device: PageDevice,
        slots: BoundedSemaphore,
        prompt: HashedPrompt,
        pages: list[range],
        computing: Callable[[], bool],
        deliver: Callable[[PagesToSend | None], None],
    ):
        self._config = config
        self._lanes = lanes
        self._device = device
        self._slots = slots
        self._prompt = prompt
        self._remaining = pages  # per group
        self._computing = computing
        self._deliver = deliver

    @property
    def missing(self) -> int:
        """Return the number of pages that were not delivered, over all groups."""
        return sum(map(len, self._remaining))

    def read_indispensable(self) -> None:
        """Read what is published of windows and states, as far as slots are free."""
        for group, policy in enumerate(self._config.policies):
            if policy.needs_all:
                self._read(group)

    def advance(self) -> bool:
        """Read what is published, as far as slots are free; return whether the export is over."""
        out_of_slots = [self._read(group) for group in range(len(self._remaining))]
        if self._computing():
            return not self.missing
        if not any(out_of_slots):
            return True
        # The request has ended. A window that lacks a page and does not just wait for a slot stays
        # incomplete, and the receiver can use nothing of the prompt without it, nor without a
        # state.
        return any(
            policy.needs_all and remaining and not waits
            for policy, remaining, waits in zip(
                self._config.policies, self._remaining, out_of_slots, strict=True
            )
        )

    def _read(self, group: int) -> bool:
        """Read and deliver published pages of a group; return whether slots ran out."""
        left = self._remaining[group]
        lane, found = self._find(group, left)
        for count in split_pages(len(found), self._config):
            if not self._slots.acquire(blocking=False):
                return True
            try:
                read = self._device.read_pages(lane, group, found[:count])
            except BaseException:
                self._slots.release()
                raise
            pages = left[:count]
            start = self._config.policies[group].sent_from(pages)
            self._deliver(PagesToSend(group, pages, start, read, self._slots))
            found = found[count:]
            left = left[count:]
            self._remaining[group] = left
        return False

    def _find(self, group: int, pages: range) -> tuple[int, list[int]]:
        """Return the lane that has most of the range from its beginning on, and the page ids."""
        digests = self._prompt.chains[group].digests[: pages.stop]
        found = {
            lane.index: lane.caches[group].lookup_run(digests, self._prompt.tokens, pages.start)
            for lane in self._lanes
        }
        return max(found.items(), key=lambda entry: len(entry[1]))

    def end(self) -> None:
        """Tell the receiver that nothing more comes."""
        self._deliver(None)
