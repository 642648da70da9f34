"""Statistics of the load generator against numbers worked out by hand."""

import numpy as np
import pytest

from jaxserve.bench.arrivals import Arrival
from jaxserve.bench.latency import Objective, Outcome, Spread, summarize
from jaxserve.bench.loops import lateness
from jaxserve.errors import ConfigError


def outcome(
    sent: float,
    *messages: tuple[float, int],
    ended: float = 0.0,
    status: str = "OK",
    due: float = 0.0,
) -> Outcome:
    """messages: clock and tokens."""
    made = Outcome(
        due or sent,
        prompt_tokens=10,
        output_tokens=sum(n for _, n in messages),
        sent=sent,
        status=status,
    )
    for message in messages:
        made.saw(*message)
    made.ended = ended or (messages[-1][0] if messages else sent)
    return made


def test_one_request() -> None:
    """Sent at 1 s; 1 token at 1.5, 4 at 2.1, 2 at 2.3; ended at 2.4."""
    one = outcome(1.0, (1.5, 1), (2.1, 4), (2.3, 2), ended=2.4)
    assert one.ttft == 0.5
    assert one.tpot == pytest.approx(0.8 / 6)
    assert one.e2e == pytest.approx(1.4)
    assert one.itl() == pytest.approx([0.15] * 4 + [0.1] * 2)


def test_a_first_message_with_several_tokens() -> None:
    assert outcome(0.0, (1.0, 3), (2.0, 2)).tpot == 0.5
    alone = outcome(0.0, (1.0, 3))
    assert alone.tpot is None and alone.itl() == []


def test_spread() -> None:
    """The 90th percentile of 1, 2, 3 and 4 seconds lies at 1 + 0.9 * 3."""
    assert Spread.of([4.0, 1.0, 3.0, 2.0]) == Spread(2500.0, 2500.0, 3700.0, 3970.0)
    assert Spread.of([0.25]) == Spread(250.0, 250.0, 250.0, 250.0)
    assert Spread.of([]) is None


def test_spread_against_numpy() -> None:
    samples = np.random.default_rng(0).exponential(1.0, 997)
    spread = Spread.of(samples)
    assert spread and spread.mean == pytest.approx(1e3 * samples.mean(), abs=1e-3)
    for name, percentile in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert getattr(spread, name) == pytest.approx(
            1e3 * np.percentile(samples, percentile), abs=1e-3
        )


def test_summary() -> None:
    """Busy from 10 to 14 s; two of four ended OK, with 3 + 5 tokens out and 10 each in."""
    outcomes = [
        outcome(10.0, (11.0, 1), (12.0, 2), due=9.99),
        outcome(11.0, (11.5, 1), (13.5, 4), ended=14.0, due=10.97),
        outcome(12.0, status="UNAVAILABLE", ended=12.5),
        outcome(13.0, (13.5, 1), status="UNFINISHED"),
    ]
    outcomes[1].cached_tokens = 7
    outcomes[2].error = "gone"
    s = summarize(outcomes, Objective(ttft=600))
    assert (s.requests, s.ok, s.unfinished, s.busy_seconds) == (4, 2, 1, 4.0)
    assert (s.requests_per_second, s.output_tokens_per_second, s.prompt_tokens_per_second) == (
        0.5,
        2.0,
        5.0,
    )
    assert (s.prompt_tokens, s.cached_prompt_tokens) == (20, 7)
    assert s.failures.keys() == {"UNAVAILABLE"}
    assert (s.failures["UNAVAILABLE"].count, s.failures["UNAVAILABLE"].example) == (1, "gone")
    assert s.ttft == Spread(750.0, 750.0, 950.0, 995.0)
    assert s.tpot == Spread(500.0, 500.0, 500.0, 500.0)
    assert s.itl and s.itl.mean == 500.0
    assert s.e2e == Spread(2500.0, 2500.0, 2900.0, 2990.0)
    assert s.lag and s.lag.mean == 10.0  # of all four, two of them in time
    assert (s.goodput, s.goodput_share) == (0.25, pytest.approx(1 / 3, abs=1e-4))


def test_summary_of_nothing() -> None:
    s = summarize([], Objective())
    assert (s.requests, s.busy_seconds, s.requests_per_second, s.ttft, s.goodput) == (
        0,
        0.0,
        0.0,
        None,
        None,
    )
    refused = summarize([outcome(1.0, status="UNAVAILABLE", ended=2.0)], Objective(ttft=1))
    assert (refused.ok, refused.goodput, refused.goodput_share, refused.e2e) == (0, 0.0, 0.0, None)


@pytest.mark.parametrize(
    ("objective", "met"),
    [
        (Objective(), True),
        (Objective(ttft=500), True),
        (Objective(ttft=499), False),
        (Objective(tpot=100), True),
        (Objective(tpot=99), False),
        (Objective(ttft=500, tpot=99), False),
        (Objective(ttft=500, tpot=100), True),
    ],
)
def test_objective(objective: Objective, met: bool) -> None:
    """TTFT 500 ms, TPOT 100 ms; both exact in binary but for the tenth."""
    assert objective.met(outcome(0.0, (0.5, 1), (0.5 + 0.09999, 1))) == met
    assert not objective.met(outcome(0.0, (0.1, 1), status="ABORTED"))


def test_an_objective_without_a_tpot() -> None:
    assert Objective(tpot=1).met(outcome(0.0, (0.5, 1)))
    assert not Objective().bounds() and Objective(tpot=1).bounds() == {"tpot": 1}


def test_an_objective_for_the_whole_request() -> None:
    assert Objective(e2e=601).met(outcome(0.0, (0.5, 1), (0.6, 1)))
    assert not Objective(ttft=501, e2e=599).met(outcome(0.0, (0.5, 1), (0.6, 1)))


def test_objectives_as_flags() -> None:
    assert Objective.parse("ttft=500,tpot=0.5") == Objective(500, 0.5)
    assert Objective.parse("e2e=2e3") == Objective(e2e=2000)
    for wrong in ("", "ttft", "ttft=", "ttft=x", "ttft=0", "ttft=nan", "itl=5", "ttft=5;tpot=5"):
        with pytest.raises(ConfigError, match="give milliseconds above 0"):
            Objective.parse(wrong)


def test_lateness() -> None:
    """One request a second: 100 ms would be a tenth of it, but 50 ms are too much anyway."""
    slow = [Arrival(float(i), 1, 1) for i in range(5)]
    fast = [Arrival(i / 100, 1, 1) for i in range(5)]
    at_once = [Arrival(0.0, 1, 1)] * 5
    assert lateness(Spread(1, 1, 1, 49.0), slow) == ""
    assert "p99 51.0 ms, with 1000.0 ms between" in lateness(Spread(1, 1, 1, 51.0), slow)
    assert lateness(Spread(0.1, 0.1, 0.1, 0.9), fast) == ""
    assert "p99 1.1 ms, with 10.0 ms between" in lateness(Spread(0.1, 0.1, 0.1, 1.1), fast)
    assert lateness(Spread(1, 1, 1, 20.0), at_once) == "" and lateness(None, slow) == ""
