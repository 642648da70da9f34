"""bench offline on the bundled model: what is run, what is counted, and how it is told."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxserve.bench import offline
from jaxserve.bench.__main__ import main
from jaxserve.bench.flags import parse
from jaxserve.bench.offline import Result, timed
from jaxserve.bench.offline_cases import Case, cases_of
from jaxserve.config import EngineOptions
from jaxserve.errors import EngineError
from jaxserve.interrupts import HeldInterrupts
from jaxserve.llm import LLM

BUNDLED = Path(__file__).parents[3] / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL = "--step-tokens 32 --page-size 16".split()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs main() with the tests' compilation cache; returns exit code, standard output, standard
    error.
    """

    def run(*flags: str) -> tuple[int, str, str]:
        cache = ["--compilation-cache", jax.config.jax_compilation_cache_dir]
        code = main(["offline", "--model", str(BUNDLED), *SMALL, *cache, *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_cases() -> None:
    """At each batch prompts, generation, and both; a 0 leaves out what needs it."""

    def cases(flags: str) -> list[tuple[str, int, int, int, int]]:
        found = cases_of(parse(["offline", *flags.split()]))
        return [(c.test, c.batch, c.prompt, c.output, c.counted) for c in found]

    assert cases("--prompt-tokens 512,2048 --output-tokens 128 --batch 1,8") == [
        case
        for batch in (1, 8)
        for case in (
            ("pp512", batch, 512, 1, 512),
            ("pp2048", batch, 2048, 1, 2048),
            ("tg128", batch, 1, 128, 128),
            ("pp512+tg128", batch, 512, 128, 640),
            ("pp2048+tg128", batch, 2048, 128, 2176),
        )
    ]
    assert [case[0] for case in cases("--prompt-tokens 0 --output-tokens 8,9")] == ["tg8", "tg9"]
    assert [case[0] for case in cases("--prompt-tokens 8,0 --output-tokens 0")] == ["pp8"]


def test_rates_against_numpy() -> None:
    result = Result(Case("pp10", batch=4, prompt=10, output=1, counted=10), [0.5, 1.0, 2.0])
    row = result.to_json()
    assert result.rates == [80, 40, 20]
    assert row["tokens_per_second"] == pytest.approx(np.mean(result.rates))
    assert row["tokens_per_second_stddev"] == pytest.approx(np.std(result.rates, ddof=1))


def test_what_is_run(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case once more than asked for, the first time for nothing; prompts of the asked-for
    size, all different.
    """
    jobs = list[tuple[list[list[int]], list[int]]]()

    def counted(engine, prompts, lengths, interrupts) -> float:
        jobs.append((prompts, lengths))
        timed(engine, prompts, lengths, interrupts)
        return float(len(jobs))

    monkeypatch.setattr(offline, "timed", counted)
    flags = "--prompt-tokens 20 --output-tokens 3 --batch 1,2 --repetitions 2 --output json".split()
    code, out, _ = call(*flags)
    found = json.loads(out)
    assert code == 0
    sizes = [(len(prompts), len(prompts[0]), lengths[0]) for prompts, lengths in jobs]
    assert sizes == [
        size
        for batch in (1, 2)
        for size in ((batch, 20, 1), (batch, 1, 3), (batch, 20, 3))
        for _ in range(3)
    ]
    texts = [tuple(prompt) for prompts, _ in jobs for prompt in prompts if len(prompt) == 20]
    assert len(set(texts)) == len(texts)
    assert [row["seconds"] for row in found["results"]] == [
        [3 * i + 2.0, 3 * i + 3.0] for i in range(6)
    ]
    assert (
        found["benchmark"] == "offline"
        and found["environment"]["device"] == jax.devices()[0].device_kind
    )
    assert found["environment"]["command"].startswith("jaxserve bench offline --model")


def test_what_the_model_is_said_to_be(call) -> None:
    """Counted by another reader of the file."""
    flags = "--prompt-tokens 16 --output-tokens 0 --repetitions 1".split()
    _, out, _ = call(*flags, "--output", "csv", "--dtype", "float32")
    (row,) = csv.DictReader(io.StringIO(out))
    with safe_open(BUNDLED / "model.safetensors", "np") as file:
        parameters = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118 (not a mapping)
    assert (row["model"], row["dtype"], row["mesh"]) == (BUNDLED.name, "float32", "1x1x1")
    assert (int(row["parameters"]), int(row["bytes"])) == (parameters, 4 * parameters)
    assert (row["test"], row["batch"], row["tokens_per_second_stddev"], row["jax"]) == (
        "pp16",
        "1",
        "0.0",
        jax.__version__,
    )


def test_the_table(call) -> None:
    code, out, _ = call(*"--prompt-tokens 16 --output-tokens 2 --batch 1 --repetitions 2".split())
    lines = out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    assert code == 0
    assert cells[0] == [
        "model",
        "params",
        "size",
        "dtype",
        "device",
        "mesh",
        "jax",
        "batch",
        "test",
        "tokens/s",
    ]
    assert [row[8] for row in cells[2:]] == ["pp16", "tg2", "pp16+tg2"] and all(
        "±" in row[9] for row in cells[2:]
    )
    assert lines[6].startswith(f"{jax.devices()[0].device_kind}, jaxserve")


def test_tokens_that_do_not_come_are_an_error() -> None:
    class Idle:
        has_work = False

        def submit(self, request) -> None:
            pass

    with pytest.raises(EngineError, match="0 tokens were made instead of 3"):
        timed(Idle(), [[1]], [3], HeldInterrupts())  # pyright: ignore[reportArgumentType]


def test_a_compile_while_measuring_is_an_error(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.engine.device.runner.DeviceRunner.compiles_after_ready", 1)
    code, out, err = call(*"--prompt-tokens 16 --output-tokens 0 --repetitions 1".split())
    assert code == 2 and not out and "1 compiles while it was measured" in err


def test_what_was_measured_before_an_interruption_is_told(
    call, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = iter([0.5, 0.5])

    def interrupted(*_) -> float:
        if (seconds := next(jobs, None)) is None:
            raise KeyboardInterrupt
        return seconds

    monkeypatch.setattr(offline, "timed", interrupted)
    code, out, _ = call(
        *"--prompt-tokens 16 --output-tokens 2 --repetitions 1 --output json".split()
    )
    assert code == 130 and [row["test"] for row in json.loads(out)["results"]] == ["pp16"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--prompt-tokens 0 --output-tokens 0", "nothing is left to measure"),
        ("--prompt-tokens many", "--prompt-tokens is many; it must be a list"),
        ("--prompt-tokens -1", "--prompt-tokens is -1; it must be above -1"),
        ("--batch 0", "--batch is 0; it must be above 0"),
        ("--repetitions 0", "--repetitions is 0; it must be above 0"),
        ("--batch 4 --max-batch 2", "--batch asks for 4 sequences a lane, more than --max-batch 2"),
        ("--prompt-tokens 100000", "more than the context of"),
        ("--prompt-tokens 60 --output-tokens 20 --max-context 64", "pp60+tg20 takes 80 tokens"),
        (
            "--prompt-tokens 60 --output-tokens 4 --batch 4 --cache-tokens 128",
            "do not fit a cache of 128 tokens a lane",
        ),
        ("--attention nonsense", "nonsense"),
        ("--model /nowhere", "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_line(call, flags: str, problem: str) -> None:
    code, out, err = call(*flags.split())
    assert code == 2 and not out
    assert err.startswith("error: ") and problem in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_batch_runs_together() -> None:
    """Four rows: as many launches as a single sequence of eight tokens needs, not four times as
    many.
    """
    options = EngineOptions(
        max_batch=4, step_tokens=64, page_size=16, max_context=64, decode_steps=1
    )
    with LLM(BUNDLED, options=options) as llm:
        llm.warm_up()
        timed(llm.engine, [[5]] * 4, [8] * 4, HeldInterrupts())
        assert 8 <= llm.runner.total.launches <= 10
