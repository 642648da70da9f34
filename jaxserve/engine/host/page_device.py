"""Protocols of the device half as KV transfer between engines sees it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.engine.kv_segment import KVSegment

Arrays = Mapping[str, np.ndarray]  # of a KVSegment, by field


class PagesRead(Protocol):
    """Pages that were copied to elsewhere on the devices, on their way to the host."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values, not counting copies on several devices."""
        ...

    def start_to_host(self) -> None:
        """Start the copy to the host, so that `to_host` waits for less; returns at once."""
        ...

    def to_host(self) -> Arrays:
        """Wait for the devices and return the arrays; may be called on any thread."""
        ...


class PageDevice(Protocol):
    """Devices that read and write KV pages, as many at a time as buckets.page_counts lists.

    The slots of layers with recurrent states are read and written one at a time.
    """

    def read_pages(self, lane: int, group: int, ids: Sequence[int]) -> PagesRead:
        """Start to copy pages as the steps launched so far leave them; returns at once."""
        ...

    def check_segment(self, segment: KVSegment) -> None:
        """Raise ConfigError or EngineError if the segment cannot become pages of this engine.

        May be called on any thread.
        """
        ...

    def upload_pages(self, group: int, arrays: Arrays) -> Any:
        """Copy whole pages of a checked segment to the devices; may be called on any thread."""
        ...

    def move_pages(self, group: int, read: Any) -> Any:
        """Copy pages that other devices of this process have read to these, and wait for it.

        The result is what `upload_pages` returns. Both engines must shard and store pages alike.
        May be called on any thread.
        """
        ...

    def write_pages(self, lane: int, group: int, ids: Sequence[int], uploaded: Any) -> None:
        """Start to write uploaded pages, before any step that is launched later.

        A page whose id is NO_PAGE is not written.
        """
        ...
