"""bench startup: stages of real processes, told by a clock that they do not hold."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from jaxserve.bench import startup
from jaxserve.bench.__main__ import main
from jaxserve.bench.stages import STAGES
from jaxserve.bench.startup import (
    COLUMNS,
    LLM,
    PROGRAMS,
    SERVERS,
    Start,
    grid,
    start_llm,
    text,
    without_bench_flags,
)
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
    rows = found["results"]
    assert [(row["program"], row["start"]) for row in rows] == list(
        product(PROGRAMS, ("cold", "cached"))
    )
    cold, cached, *served = rows
    assert not err and cold["compiled"] == cold["programs"] > 2 and cached["compiled"] == 0
    for row in (cold, cached):
        seconds = row["seconds"]
        assert [stage for stage in seconds if seconds[stage] is not None] == [*STAGES, "total"]
        assert min(seconds[stage] for stage in STAGES) > 0
        assert seconds["total"] == pytest.approx(sum(seconds[stage] for stage in STAGES))
    for row in served:
        seconds = row["seconds"]
        assert seconds["total"] == pytest.approx(seconds["ready"] + seconds["first token"])
        assert seconds["ready"] > 0 and seconds["import"] is None
    assert found["benchmark"] == "startup" and found["model"]["model"] == BUNDLED.name


def test_every_repetition_begins_with_an_empty_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, str, str]]()

    def fake(program: str, kind: str, repetition: int, words: Sequence[str], folder: str) -> Start:
        found = Path(folder)
        assert list(found.iterdir()) == ([found / "x"] if kind == "cached" else [])
        (found / "x").touch()
        asked.append((program, kind, folder))
        if program != LLM:
            return Start(program, kind, repetition, {"ready": 1.0, "first token": 0.5})
        count = 12 if kind == "cold" else 0
        return Start(program, kind, repetition, dict.fromkeys(STAGES, 1.0), MODEL, 12, count)

    monkeypatch.setattr(startup, "start", fake)
    assert main(["startup", "--repetitions", "2"]) == 0
    assert [(program, kind) for program, kind, _ in asked] == [
        (program, kind) for _ in range(2) for program in PROGRAMS for kind in ("cold", "cached")
    ]
    folders = {folder for _, _, folder in asked}
    assert len(folders) == 2 * len(PROGRAMS) and not any(Path(f).exists() for f in folders)
    rows = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in rows[2].split("|")[1:5]] == ["LLM", "cold", "2", "1.00 ± 0.00"]


def test_a_server_gets_the_flags_that_it_knows() -> None:
    words = ["--model", "DIR", "--output=csv", "--prefer", "latency", "--repetitions", "2"]
    assert without_bench_flags(words) == ["--model", "DIR", "--prefer", "latency"]


def test_tables() -> None:
    starts = [
        Start(LLM, kind, i, dict.fromkeys(STAGES, seconds + i), MODEL, 12, compiled)
        for i in range(2)
        for kind, seconds, compiled in (("cold", 4.0, 12), ("cached", 1.0, 0))
    ]
    served = Start(SERVERS["first"], "cold", 0, {"ready": 2.0, "first token": 0.5})
    cold, cached, server = grid([*starts, served]).rows
    assert cold[:4] == ["LLM", "cold", "2", "4.50 ± 0.71"]
    assert cold[-3:] == ["22.50 ± 3.54", "12", "12"] and cached[-3:] == ["7.50 ± 3.54", "12", "0"]
    ready = 3 + COLUMNS.index("ready")
    assert cold[ready] == "" and server[:3] == ["serve, ready when first", "cold", "1"]
    assert server[3:ready] == [""] * (ready - 3)
    assert server[ready:] == ["2.00", "0.50", "2.50", "", ""]
    header, *lines = text("csv", starts, {}).splitlines()
    assert header.endswith(
        "seconds_import,seconds_device,seconds_load,seconds_compile,seconds_ready,seconds_first "
        "token,seconds_total"
    )
    assert [line.split(",")[3] for line in lines] == ["cold", "cached"] * 2


@pytest.mark.system
def test_a_program_that_ends_early_says_why() -> None:
    with pytest.raises(
        ConfigError, match=r"ended with exit code 2: --max-batch is 0; it must be between"
    ):
        start_llm("cold", 0, [*FLAGS, "--max-batch", "0"])


def test_the_cache_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "--compilation-cache", "/tmp"]) == 2
    assert capsys.readouterr().err.startswith("error: --compilation-cache is decided here")
