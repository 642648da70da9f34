"""Arrivals of the load generator: drawn, or of traces as they were published; and the tokens of
their prompts.
"""

from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench.arrivals import (
    REQUESTS,
    Arrival,
    Lengths,
    Process,
    at_rate,
    capped,
    drawn,
    due_times,
    mean_gap,
    resized,
    stretched,
)
from jaxserve.bench.prompts import RandomPrompts, TextPrompts
from jaxserve.bench.traces import read_trace
from jaxserve.errors import ConfigError

MOONCAKE = """\
{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1000, "input_length": 1030, "output_length": 9, "hash_ids": [0, 2, 3]}
{"timestamp": 3500, "input_length": 512, "output_length": 1, "hash_ids": [4]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:04.2500000,3180,8\r
2023-11-16 18:17:03.9799600,4808,10\r
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def poisson(
    rate: float, requests: int, prompt: Lengths, output: Lengths, seed: int
) -> list[Arrival]:
    return drawn(
        due_times(Process("poisson", rate).gaps(seed), requests, None), prompt, output, seed
    )


def test_poisson_has_exponential_gaps_of_the_rate() -> None:
    arrivals = poisson(4.0, 20_000, Lengths(10, 20), Lengths(7, 7), seed=3)
    gaps = np.diff([a.due for a in arrivals])
    assert arrivals[0].due == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.01)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert {a.prompt_tokens for a in arrivals} == set(range(10, 21)) and {
        a.output_tokens for a in arrivals
    } == {7}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_is_as_bursty_as_asked(burstiness: float) -> None:
    gaps = np.diff(due_times(Process("gamma", 4.0, burstiness).gaps(0), 50_000, None))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_and_at_once() -> None:
    assert due_times(Process("constant", 4.0).gaps(0), 4, None) == [0, 0.25, 0.5, 0.75]
    assert due_times(Process("poisson", np.inf).gaps(0), 3, None) == [0, 0, 0]
    assert len(due_times(Process("constant", 4.0).gaps(0), None, None)) == REQUESTS


@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant"])
def test_a_duration_has_all_that_are_due_before_its_end(kind: str) -> None:
    """Times by duration are those by number up to its end; both bounds hold together."""
    gaps = Process(kind, 100.0, 0.5).gaps(7)
    timed = due_times(gaps, None, 30.0)
    many = due_times(gaps, 10_000, None)
    assert timed == [due for due in many if due < 30.0]
    assert len(timed) == pytest.approx(3000, rel=0.1)
    assert due_times(gaps, 50, 30.0) == due_times(gaps, 50, None)
    assert due_times(gaps, 10_000, 30.0) == timed


def test_a_seed_gives_the_same_requests_at_every_rate() -> None:
    slow, fast = (poisson(rate, 50, Lengths(1, 99), Lengths(1, 99), seed=1) for rate in (1.0, 10.0))
    np.testing.assert_allclose([a.due for a in slow], [10 * a.due for a in fast])
    assert [(a.prompt_tokens, a.output_tokens) for a in slow] == [
        (a.prompt_tokens, a.output_tokens) for a in fast
    ]
    assert slow != poisson(1.0, 50, Lengths(1, 99), Lengths(1, 99), seed=2)


def test_lengths() -> None:
    assert Lengths.parse("128") == Lengths(128, 128)
    assert Lengths.parse("64-256") == Lengths(64, 256)
    for wrong in ("", "0", "-5", "5-", "6-5", "x", "1.5"):
        with pytest.raises(ConfigError, match="not a length"):
            Lengths.parse(wrong)


def test_mooncake(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, MOONCAKE), None) == [
        Arrival(0.0, 700, 5, (0, 1), 512),
        Arrival(0.0, 1030, 9, (0, 2, 3), 512),
        Arrival(2.5, 512, 1, (4,), 512),
    ]
    assert len(read_trace(written(tmp_path, MOONCAKE), 2)) == 2


def test_azure_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE), None)
    assert first == Arrival(0.0, 4808, 10)
    assert (second.prompt_tokens, second.output_tokens) == (3180, 8)
    assert second.due == pytest.approx(0.27004, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "neither Mooncake"),
        ("time,tokens\n1,2\n", "neither Mooncake"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2 is no request .ValueError"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,0\n",
            "line 2 is no request .ValueError: a length below 1",
        ),
        (MOONCAKE + '{"timestamp": 1}\n', "line 4 is no request .KeyError"),
        (
            MOONCAKE.replace("[0, 1]", "[0]"),
            "line 1 is no request .ValueError: 1 hash_ids for 700 tokens in blocks of 512",
        ),
        ("{nonsense\n", "line 1 is no request .JSONDecodeError"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_trace(written(tmp_path, text), None)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none", None)


def test_times_are_scaled(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE), None)
    assert [a.due for a in stretched(trace, 0.5)] == [0, 0, 1.25]
    assert mean_gap(trace) == 1.25
    faster = at_rate(trace, 4.0)
    assert mean_gap(faster) == 0.25 and [a.due for a in faster] == [0, 0, 0.5]
    with pytest.raises(ConfigError, match="all arrive at once"):
        at_rate(trace[:2], 1.0)


def test_blocks_are_resized_as_wholes(tmp_path: Path) -> None:
    """A hundredth: blocks of 5 tokens. 700 = 512 + 188 become 5 + 2, 1,030 = 2 * 512 + 6 become 2 *
    5 + 1.
    """
    small = resized(read_trace(written(tmp_path, MOONCAKE), None), 0.01)
    assert [(a.prompt_tokens, a.output_tokens, a.block_tokens) for a in small] == [
        (7, 1, 5),
        (11, 1, 5),
        (5, 1, 5),
    ]
    assert resized([Arrival(0, 250, 30)], 0.1) == [Arrival(0, 25, 3)]


def test_capped_requests_are_counted() -> None:
    arrivals = [Arrival(0, 10, 10), Arrival(0, 11, 5), Arrival(0, 5, 11), Arrival(0, 99, 99)]
    cut, count = capped(arrivals, 10, 10)
    assert cut == [Arrival(0, 10, 10), Arrival(0, 10, 5), Arrival(0, 5, 10), Arrival(0, 10, 10)]
    assert count == 3
    assert capped(arrivals, None, None) == (arrivals, 0)


def test_prompts_share_what_their_blocks_share() -> None:
    prompts = RandomPrompts(1000, (3, 7), seed=5)
    a = prompts.of(0, Arrival(0, 25, 1, (8, 1, 2), 10))
    b = prompts.of(1, Arrival(0, 30, 1, (8, 1, 3), 10))
    assert (len(a), len(b)) == (25, 30)
    assert a[:20] == b[:20] and a[20:] != b[20:25]
    alone = [prompts.of(number, Arrival(0, 25, 1)) for number in range(2)]
    assert alone[0] != alone[1] and alone[0] == RandomPrompts(1000, (3, 7), seed=5).of(
        0, Arrival(0, 25, 1)
    )
    assert alone[0] != RandomPrompts(1000, (3, 7), seed=6).of(0, Arrival(0, 25, 1))
    assert alone[0] != RandomPrompts(1000, (3, 7), seed=5, run=1).of(0, Arrival(0, 25, 1))


def test_prompts_have_every_token_but_the_end_tokens() -> None:
    assert set(RandomPrompts(10, (3, 7), seed=0).of(0, Arrival(0, 500, 1))) == {
        0,
        1,
        2,
        4,
        5,
        6,
        8,
        9,
    }


def test_published_traces_are_read_whole(data_folder: Path) -> None:
    """Counts as their README has them."""
    traces = data_folder / "traces"
    assert len(read_trace(traces / "azure2023" / "AzureLLMInferenceTrace_code.csv", None)) == 8819
    synthetic = read_trace(traces / "mooncake" / "synthetic_trace.jsonl", None)
    assert len(synthetic) == 3993
    assert sum(a.prompt_tokens for a in synthetic) == 61_194_628


def test_texts_are_asked_in_their_order_again_and_again() -> None:
    prompts = TextPrompts(["a", "b"])
    assert [prompts.of(number, Arrival(0, 0, 1)) for number in range(5)] == [
        "a",
        "b",
        "a",
        "b",
        "a",
    ]
