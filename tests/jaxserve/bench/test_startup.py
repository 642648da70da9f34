"""bench startup: stages of real processes, told by a clock that they do not hold."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve.bench import startup
from jaxserve.bench.__main__ import main
from jaxserve.bench.stages import STAGES
from jaxserve.bench.startup import Start, grid, start, text
from jaxserve.errors import ConfigError

BUNDLED = Path(__file__).parents[3] / "checkpoints" / "bundled" / "tiny-chat-draft"
FLAGS = [
    "--model",
    str(BUNDLED),
    *"--max-batch 1 --step-tokens 16 --page-size 16 --max-context 16".split(),
]
MODEL = {
    "model": "tiny",
    "parameters": 2_000_000,
    "dtype": "float32",
    "device": "cpu",
    "mesh": "1x1x1",
}


@pytest.mark.slow
@pytest.mark.system
def test_a_cold_and_a_cached_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", *FLAGS, "--repetitions", "1", "--output", "json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    cold, cached = found["results"]
    assert not err and (cold["start"], cached["start"]) == ("cold", "cached")
    assert cold["compiled"] == cold["programs"] > 2 and cached["compiled"] == 0
    for row in found["results"]:
        seconds = row["seconds"]
        assert list(seconds) == [*STAGES, "total"] and min(seconds.values()) > 0
        assert seconds["total"] == pytest.approx(sum(seconds[stage] for stage in STAGES))
    assert found["benchmark"] == "startup" and found["model"]["model"] == BUNDLED.name


def test_every_repetition_begins_with_an_empty_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, int, str]]()

    def fake(kind: str, repetition: int, flags: Sequence[str]) -> Start:
        folder = Path(flags[-1])
        assert flags[-2] == "--compilation-cache" and list(folder.iterdir()) == (
            [folder / "x"] if kind == "cached" else []
        )
        (folder / "x").touch()
        asked.append((kind, repetition, flags[-1]))
        return Start(
            kind, repetition, dict.fromkeys(STAGES, 1.0), MODEL, 12, 12 if kind == "cold" else 0
        )

    monkeypatch.setattr(startup, "start", fake)
    assert main(["startup", "--repetitions", "2"]) == 0
    assert [kind for kind, _, _ in asked] == ["cold", "cached"] * 2
    assert len({folder for _, _, folder in asked}) == 2 and not any(
        Path(folder).exists() for _, _, folder in asked
    )
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split("|")[1:4] == [" cold   ", "      2 ", " 1.00 ± 0.00 "]


def test_tables() -> None:
    starts = [
        Start(kind, i, dict.fromkeys(STAGES, seconds + i), MODEL, 12, compiled)
        for i in range(2)
        for kind, seconds, compiled in (("cold", 4.0, 12), ("cached", 1.0, 0))
    ]
    cold, cached = grid(starts).rows
    assert cold[:3] == ["cold", "2", "4.50 ± 0.71"] and cold[-3:] == ["22.50 ± 3.54", "12", "12"]
    assert cached[-3:] == ["7.50 ± 3.54", "12", "0"]
    header, *lines = text("csv", starts, {}).splitlines()
    assert header.endswith(
        "seconds_import,seconds_device,seconds_load,seconds_compile,seconds_first "
        "token,seconds_total"
    )
    assert [line.split(",")[2] for line in lines] == ["cold", "cached"] * 2


@pytest.mark.system
def test_a_program_that_ends_early_says_why() -> None:
    with pytest.raises(
        ConfigError, match=r"ended with exit code 2: --max-batch is 0; it must be between"
    ):
        start("cold", 0, [*FLAGS, "--max-batch", "0"])


def test_the_cache_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "--compilation-cache", "/tmp"]) == 2
    assert capsys.readouterr().err.startswith("error: --compilation-cache is decided here")
