"""Progress of downloads: huggingface_hub reports it to a class with the methods of tqdm's bars."""

import threading
from collections.abc import Callable
from typing import Any, Self

Report = Callable[[int, int, str], None]  # bytes done, bytes in total, what


class StoppedError(Exception):
    """Raised in a thread that downloads, since the others are given up."""


class Progress:
    """Sum over the downloads of several threads.

    Args:
        total: Bytes of all downloads.
        report: Function called with every part that has come.
    """

    def __init__(self, total: int, report: Report):
        self._total = total
        self._report = report
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = False

    def add(self, size: float, what: str) -> None:
        """Count bytes of one file, if they still matter."""
        with self._lock:
            if self._stopped:
                return
            self._done += int(size)
            # The last byte is that of `finish`: until then there are hashes to compare.
            self._report(max(0, min(self._done, self._total - 1)), self._total, what)

    def finish(self) -> None:
        """Report that all is done."""
        self._report(self._total, self._total, "")

    def stop(self) -> None:
        """Give all downloads up."""
        with self._lock:
            self._stopped = True

    def check(self) -> None:
        """Raise StoppedError after `stop`."""
        if self._stopped:
            raise StoppedError


def watched(file: str, progress: Progress) -> Any:
    """Return a class for `tqdm_class` that counts the bytes of a file, and ends it after `stop`."""
    return _bar(lambda size: progress.add(size, file), progress.check)


def unwatched() -> Any:
    """Return a class for `tqdm_class` that shows nothing."""
    return _bar(lambda size: None, lambda: None)


def _bar(told: Callable[[float], None], check: Callable[[], None]) -> Any:
    class Bar:
        """The part of tqdm's interface that huggingface_hub uses for one file."""

        def __init__(self, *_: Any, total: float | None = None, **__: Any):
            check()
            self.n = 0.0
            self.total = total
            self._thread = threading.get_ident()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def update(self, size: float | None = 1) -> None:
            self.n += size or 0
            told(size or 0)
            # Xet calls from a thread of its own, which prints an exception and goes on.
            if threading.get_ident() == self._thread:
                check()

        def update_transfer(self, size: float | None = 1) -> None:
            """Ignore bytes as Xet sends them; `update` has those of the file."""

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

        def refresh(self) -> None:
            pass

        def close(self) -> None:
            pass

    return Bar
