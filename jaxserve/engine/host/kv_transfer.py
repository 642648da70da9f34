"""Pages of prompts on their way from the prefix cache of one engine to that of another.

    here   Export: after a step, what it published is read --> Outgoing.to_host() -> Piece
    there  Piece -> Import.stage(): uploaded --> Import.install(): written, published, and idle

Between two meshes of one process, Import.move() takes the Outgoing itself, and the host sees none
of it.

Nothing is held for it on either side. What is evicted before it could be read is not sent, what
finds no room is not installed, and whoever admits the prompt computes what is not cached: whatever
fails here costs time alone.

On an engine's thread, but for Outgoing, Import.stage and Import.move.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import Any, Protocol

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import PIECES_AT_ONCE, in_counts
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.prefix_cache import Chain
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.kv_segment import Piece
from jaxserve.errors import ConfigError, DeadlineError, EngineError
from jaxserve.request import Request

Arrays = Mapping[str, np.ndarray]  # of a Piece, by field


class PagesRead(Protocol):
    @property
    def nbytes(self) -> int: ...

    def start_to_host(self) -> None:
        """So that to_host waits for less. Returns at once."""
        ...

    def to_host(self) -> Arrays:
        """Wait for the devices. For any thread."""
        ...


class PageDevice(Protocol):
    """The device half as transfers see it. Pages are read and written by the numbers of
    buckets.page_counts.
    """

    def read_pages(self, lane: int, group: int, ids: Sequence[int]) -> PagesRead:
        """Start to copy pages as the steps launched so far leave them, on the devices; returns at
        once.
        """
        ...

    def check_piece(self, piece: Piece) -> None:
        """ConfigError or EngineError where it cannot become pages here. For any thread."""
        ...

    def upload_pages(self, group: int, arrays: Arrays) -> Any:
        """What was checked, of whole pages. For any thread."""
        ...

    def move_pages(self, group: int, read: Any) -> Any:
        """What devices of the same form have read, to these, as if it was uploaded; waits for it.
        For any thread.
        """
        ...

    def write_pages(self, lane: int, group: int, ids: Sequence[int], uploaded: Any) -> None:
        """Start to write it, before any step that is launched later; NO_PAGE drops a page."""
        ...


@dataclass(frozen=True)
class Prompt:
    """chains: of its whole pages, per page group."""

    tokens: list[int]
    chains: list[Chain]


class Outgoing:
    """Pages that were read and are still on the devices. Whoever gets it calls to_host, to or drop;
    for any thread.

    pages: of the prompt, as the engine that has read them counts them. nbytes: of the numbers,
    copies left out.
    """

    def __init__(
        self, group: int, pages: range, page_size: int, read: PagesRead, room: BoundedSemaphore
    ):
        self.group, self.pages, self.start = group, pages, pages.start * page_size
        self.nbytes = read.nbytes
        self._read: PagesRead | None = read
        self._room, self._lock = room, Lock()

    def start_to_host(self) -> None:
        """So that to_host waits for less. Returns at once; nothing where it was taken or
        dropped."""
        if read := self._read:
            read.start_to_host()

    def to_host(self) -> Piece:
        """Waits for the devices. EngineError where it was taken or dropped before."""
        with self._taken() as read:
            return Piece(self.group, self.start, **read.to_host())

    def to(self, device: PageDevice) -> Any:
        """Uploaded there, see PageDevice.move_pages. Waits, and EngineError as of to_host."""
        with self._taken() as read:
            return device.move_pages(self.group, read)

    @contextmanager
    def _taken(self) -> Iterator[PagesRead]:
        read = self._take()
        if read is None:
            raise EngineError(
                f"the piece at token {self.start} of page group {self.group} was taken or "
                f"dropped before"
            )
        try:
            yield read
        finally:
            self._room.release()

    def drop(self) -> None:
        """Nothing more where it was taken or dropped before."""
        if self._take():
            self._room.release()

    def _take(self) -> PagesRead | None:
        with self._lock:
            read, self._read = self._read, None
        return read


class Export:
    """Reads a prompt's pages: those that are cached, and those that its request computes, as they
    are published.

    pages: of each page group, those to be read. They come in order, group by group. It ends when
    all were delivered, or when the request has ended and the rest is not to be found, or of no use.
    """

    def __init__(
        self,
        transfers: "Transfers",
        device: PageDevice,
        request_id: str,
        prompt: Prompt,
        pages: list[range],
        deliver: Callable[[Outgoing | None], None],
    ):
        self._transfers, self._device, self._request_id = transfers, device, request_id
        self._prompt, self._left, self._deliver = prompt, pages, deliver

    @property
    def missing(self) -> int:
        """Pages that were not delivered, of all groups."""
        return sum(map(len, self._left))

    def read_windows(self) -> None:
        """Read what there is of the groups that have a window, and has room."""
        for group, pool in enumerate(self._transfers.config.pools):
            if pool.window:
                self._read(group)

    def advance(self) -> bool:
        """Read what there is and has room; whether that was the last."""
        waits = [self._read(group) for group in range(len(self._left))]
        if self._transfers.computes(self._request_id):
            return not self.missing
        lost = [bool(left) and not waiting for left, waiting in zip(self._left, waits, strict=True)]
        windows = [pool.window is not None for pool in self._transfers.config.pools]
        return not any(waits) or any(
            gone and window for gone, window in zip(lost, windows, strict=True)
        )

    def _read(self, group: int) -> bool:
        """Whether there is more of the group that has no room yet."""
        transfers, left = self._transfers, self._left[group]
        lane, found = transfers.find(group, self._prompt, left)
        for count in in_counts(len(found), transfers.config):
            if not transfers.room.acquire(blocking=False):
                return True
            try:
                read = self._device.read_pages(lane, group, found[:count])
            except BaseException:
                transfers.room.release()
                raise
            self._deliver(
                Outgoing(group, left[:count], transfers.config.page_size, read, transfers.room)
            )
            found, left = found[count:], left[count:]
            self._left[group] = left
        return False

    def end(self) -> None:
        self._deliver(None)


@dataclass(frozen=True)
class Staged:
    """Whole pages of a page group, on the devices."""

    group: int
    pages: range  # of the prompt
    uploaded: Any


class Import:
    """Installs a prompt's pages in the prefix cache of one lane: the one that had most of them.

    cached: tokens of the prompt that a request would have found there before. installed: pages that
    came to it, of all groups.
    """

    def __init__(
        self,
        lane: Lane,
        prompt: Prompt,
        cached: int,
        config: EngineConfig,
        device: PageDevice,
        room: BoundedSemaphore,
    ):
        self.cached, self.installed = cached, 0
        self._lane, self._prompt, self._config = lane, prompt, config
        self._device, self._room = device, room
        self._tails: dict[
            int, Piece
        ] = {}  # by group, the part of a page that the last piece ended with

    def stage(self, piece: Piece, timeout: float) -> Iterator[Staged]:
        """Upload the whole pages that this piece and the one before it make up, to be installed one
        by one.

        For one thread at a time, which need not be the engine's. Each has its place on the devices
        until the next is asked for. timeout: seconds that one waits for a place. DeadlineError when
        they pass; ConfigError, EngineError where the piece cannot become pages here.
        """
        self._device.check_piece(piece)
        pages, arrays = self._whole_pages(piece)
        size, done = self._config.page_size, 0
        for count in in_counts(len(pages), self._config):
            part = {name: x[:, done * size : (done + count) * size] for name, x in arrays.items()}
            with self._place(timeout):
                yield Staged(
                    piece.group,
                    pages[done : done + count],
                    self._device.upload_pages(piece.group, part),
                )
            done += count

    def move(self, outgoing: Outgoing, timeout: float) -> Iterator[Staged]:
        """The same for what devices of this process hold whose engine's pages are of the same form
        (DeviceRunner).

        It goes from device to device. EngineError where it was taken or dropped before.
        """
        with self._place(timeout):
            yield Staged(outgoing.group, outgoing.pages, outgoing.to(self._device))

    @contextmanager
    def _place(self, timeout: float) -> Iterator[None]:
        if not self._room.acquire(timeout=timeout):
            raise DeadlineError(
                f"{PIECES_AT_ONCE} pieces were on the devices for {timeout:g} s, which is the most"
            )
        try:
            yield
        finally:
            self._room.release()

    def _whole_pages(self, piece: Piece) -> tuple[range, Arrays]:
        """Pages of the prompt, and what is in them; what comes after them is kept."""
        size, tail = self._config.page_size, self._tails.pop(piece.group, None)
        if tail and tail.stop == piece.start and tail.k.dtype == piece.k.dtype:
            both = {
                name: np.concatenate([tail.arrays[name], x], axis=1)
                for name, x in piece.arrays.items()
            }
            piece = Piece(piece.group, tail.start, **both)
        useful = len(self._prompt.chains[piece.group].digests)
        first, stop = -(-piece.start // size), min(piece.stop // size, useful)
        if first > stop:
            return range(0), {}
        if stop < useful and stop * size < piece.stop:
            rest = {
                name: x[:, stop * size - piece.start :].copy() for name, x in piece.arrays.items()
            }
            self._tails[piece.group] = Piece(piece.group, stop * size, **rest)
        begin, end = first * size - piece.start, stop * size - piece.start
        return range(first, stop), {name: x[:, begin:end] for name, x in piece.arrays.items()}

    def install(self, staged: Staged) -> int:
        """Make its pages findable; how many of them are new here.

        0 where the chain of pages before them has broken off, fewer where the pool has no more that
        nobody holds.
        """
        write = self._device.write_pages
        new = self._lane.adopt(
            staged.group,
            self._prompt.tokens,
            self._prompt.chains[staged.group],
            staged.pages,
            lambda ids: write(self._lane.index, staged.group, ids, staged.uploaded),
        )
        self.installed += new
        return new


def wanted_pages(config: EngineConfig, tokens: int, start: int, page_size: int) -> list[range]:
    """Of a prompt of so many tokens, the pages of each group that another engine lacks: whole ones
    here, of which it can make whole pages of its own.

    start: tokens that it has, page_size: of its pages. It computes the last token itself. Of a
    window, what the first token that it computes sees.
    """
    own = config.page_size
    reach = min(tokens // own * own, tokens - 1) // page_size * page_size
    firsts = [
        max(start, pool.first_seen(reach) // page_size * page_size) // own for pool in config.pools
    ]
    stop = config.page_span(reach) if start < reach else 0
    return [range(min(first, stop), stop) for first in firsts]


class Transfers:
    """What an engine gives to others of a prompt's pages, and takes from them."""

    def __init__(self, scheduler: Scheduler, device: PageDevice | None):
        """device: None where pages are not exchanged."""
        self.config, self._device = scheduler.config, device
        self.room = BoundedSemaphore(PIECES_AT_ONCE)
        self._scheduler, self._lanes = scheduler, scheduler.lanes
        self._exports: list[Export] = []

    def export(
        self,
        request: Request,
        start: int,
        page_size: int,
        deliver: Callable[[Outgoing | None], None],
    ) -> Export:
        """Read what another engine lacks of the request's prompt, now and after each step; the
        request may be running.

        start: tokens that the other one has, page_size: of its pages. deliver: called on this
        thread with each part, of every page group in the order of the prompt, and at last with
        None; it must neither block nor raise. ConfigError where pages are not exchanged.
        """
        if start < 0 or page_size < 1:
            raise EngineError(f"an export from token {start} on, to pages of {page_size} tokens")
        pages = wanted_pages(self.config, len(request.prompt), start, page_size)
        prompt = self._prompt(request.prompt, request.salt, max(part.stop for part in pages))
        export = Export(self, self._exchanging(), request.id, prompt, pages, deliver)
        self._exports.append(export)
        try:
            self.advance()
        except BaseException:
            self.close(export)
            raise
        return export

    def receive(self, tokens: Sequence[int], salt: str = "") -> Import:
        """For pages of this prompt that another engine has. ConfigError where pages are not
        exchanged.
        """
        prompt = self._prompt(tokens, salt, (len(tokens) - 1) // self.config.page_size)
        lane = max(
            self._lanes, key=lambda lane: (self._cached(lane, prompt), lane.available_pages())
        )
        return Import(
            lane, prompt, self._cached(lane, prompt), self.config, self._exchanging(), self.room
        )

    def advance(self) -> None:
        """Go on with every export: after each step, and after a piece was taken while there are no
        steps.

        Windows go first, of all exports: there are few pages for them, and without its window
        nothing of a prompt is of use.
        """
        for export in list(self._exports):
            export.read_windows()
        for export in list(self._exports):
            if export in self._exports and export.advance():
                self.close(export)
                export.end()

    def close(self, export: Export) -> None:
        """Read nothing more for it; nothing where it has ended. What was delivered is its
        taker's."""
        if export in self._exports:
            self._exports.remove(export)

    # ---- for exports

    def computes(self, request_id: str) -> bool:
        return self._scheduler.has(request_id)

    def find(self, group: int, prompt: Prompt, pages: range) -> tuple[int, list[int]]:
        """The lane that has most of these pages from the first on, and their numbers there."""
        digests = prompt.chains[group].digests[: pages.stop]
        found = {
            lane.index: lane.caches[group].run(digests, prompt.tokens, pages.start)
            for lane in self._lanes
        }
        return max(found.items(), key=lambda entry: len(entry[1]))

    # ---- helpers

    def _exchanging(self) -> PageDevice:
        if self._device is None:
            raise ConfigError(
                "this engine exchanges no pages with others (EngineOptions.page_exchange)"
            )
        return self._device

    def _prompt(self, tokens: Sequence[int], salt: str, pages: int) -> Prompt:
        prompt = Prompt(list(tokens), [Chain() for _ in self.config.pools])
        self._lanes[0].extend_chains(prompt.chains, prompt.tokens, salt, pages)
        return prompt

    def _cached(self, lane: Lane, prompt: Prompt) -> int:
        return len(lane.cached(prompt.tokens, prompt.chains)[0]) * self.config.page_size
