"""Progress bars, on a terminal and in a notebook."""

import html
import time
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


class Bar:
    """A progress bar that appears with the first update and disappears with the last.

    It is drawn on the console's terminal, or else in the notebook that runs this program; nothing
    is drawn where there is neither, or with shown=False.

    Args:
        in_bytes: Whether steps are bytes, shown in MB and GB, on a terminal with their speed.
    """

    def __init__(self, console: Console, title: str, shown: bool = True, in_bytes: bool = False):
        self._place: _InNotebook | _OnTerminal | None = None
        if shown and console.is_jupyter:
            self._place = _InNotebook(title, in_bytes)
        elif shown and console.is_terminal:
            self._place = _OnTerminal(console, title, in_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._place:
            self._place.clear()

    def update(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` steps are done."""
        if self._place is None:
            return
        self._place.draw(done, total, what)
        if done >= total:
            self._place.clear()


def stderr_bar(shown: bool, title: str, in_bytes: bool = False) -> Bar:
    """Return a bar on standard error as it is now, or in the notebook. Arguments as in `Bar`."""
    return Bar(Console(stderr=True, highlight=False), title, shown, in_bytes)


class _OnTerminal:
    def __init__(self, console: Console, title: str, in_bytes: bool):
        counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
        columns = (
            TextColumn(f"{title:11}"),
            BarColumn(),
            *counts,
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = None

    def draw(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=done, total=total, description=escape(what))
        self._progress.start()  # where it is drawn already, it draws itself again soon

    def clear(self) -> None:
        self._progress.stop()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = None


class _InNotebook:
    """A bar of HTML, which needs no widgets: they are missing in many notebooks."""

    PAUSE = 0.1  # seconds between two drawings: each is a message to the browser

    def __init__(self, title: str, in_bytes: bool):
        self._title = title
        self._number = decimal if in_bytes else str
        self._handle = None
        self._drawn = 0.0

    def draw(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if self._handle and now < self._drawn + self.PAUSE:
            return
        self._drawn = now
        bar = f'<progress value="{done}" max="{total}"></progress>'
        counts = f"{self._number(done)}/{self._number(total)}"
        self._show(f"<pre>{self._title} {bar} {counts} {html.escape(what)}</pre>")

    def clear(self) -> None:
        if self._handle:
            self._show("")
        self._handle = None

    def _show(self, text: str) -> None:
        from IPython.display import display

        data = {"text/html": text, "text/plain": ""}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
