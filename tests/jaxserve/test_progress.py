"""Bars: on a terminal and in a notebook, and nowhere else."""

import io
from typing import Any

import pytest
from rich.console import Console

from jaxserve.llm import LLM
from jaxserve.progress import Bar, _InNotebook
from tests.jaxserve.test_llm import BUNDLED, OPTIONS


def drawn(*, terminal: bool, shown: bool = True) -> str:
    file = io.StringIO()
    with Bar(Console(file=file, force_terminal=terminal, width=100), "loading", shown) as bar:
        bar.update(1, 3, "layers.0 [a]")
        bar.update(3, 3, "")
        bar.update(1, 3, "again")
    return file.getvalue()


def test_on_a_terminal() -> None:
    text = drawn(terminal=True)
    assert "loading" in text and "1/3" in text and "layers.0 [a]" in text and "again" in text


def test_nothing_where_nobody_looks() -> None:
    assert drawn(terminal=False) == drawn(terminal=True, shown=False) == ""


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        @staticmethod
        def update(data: dict[str, str], **_: Any) -> None:
            shown.append(data)

    def display(data: dict[str, str], **_: Any) -> Handle:
        shown.append(data)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(_InNotebook, "PAUSE", 3600.0)
    console = Console(file=io.StringIO(), force_jupyter=True)
    with Bar(console, "loading") as bar:
        bar.update(1, 3, "<b>")
        bar.update(2, 3, "too soon to be drawn")
    assert all(data["text/plain"] == "" for data in shown)
    first, last = (data["text/html"] for data in shown)
    assert '<progress value="1" max="3">' in first and "&lt;b&gt;" in first and last == ""


def test_an_llm_shows_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(
        "jaxserve.progress.Console", lambda **_: Console(file=file, force_terminal=True, width=100)
    )
    for progress in (True, False):
        file.seek(0)
        file.truncate()
        with LLM(BUNDLED, options=OPTIONS, progress=progress) as llm:
            llm.generate("Once", max_tokens=2)
        text = file.getvalue()
        found = [title in text for title in ("loading", "compiling", "generating")]
        assert found == [progress] * 3


def test_functions_of_the_caller_take_the_place_of_bars() -> None:
    told: list[str] = []

    def tell(done: int, total: int, what: str) -> None:
        told.append(what)

    with LLM(BUNDLED, options=OPTIONS, on_load=tell, on_compile=tell) as llm:
        loaded = len(told)
        llm.generate("Once", max_tokens=2)
    assert 0 < loaded < len(told) and "row writers" in told[loaded:]
