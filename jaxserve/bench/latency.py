"""What a client saw of its requests, and what that comes to: latency, throughput, goodput.

Clock readings are seconds of one monotonic clock (time.monotonic), taken when a message was read.
For each request:

- TTFT: from sending it to the first message with tokens in it;
- TPOT: from there to the last one, over the tokens that came after the first message; none when
  there were none;
- E2E: from sending it to the end of its stream.

Inter-token latency (ITL) belongs to a token: the gap between its message and the one before it,
over the tokens of its message. What came with a request's first message has none. A server that
sends several tokens at a time thus has the ITL of one that sends them evenly; TTFT and E2E show the
difference.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np

from jaxserve.errors import ConfigError

OK, UNFINISHED = "OK", "UNFINISHED"
QUANTILES = 0.5, 0.9, 0.99


@dataclass(slots=True)
class Outcome:
    """One request. due, sent, ended: clock readings; times, counts: when messages came, and with
    how many tokens.

    output_tokens: asked for; the most of them when the answer may end early. status: OK, UNFINISHED
    (until it ends, or for ever when nobody waits for it), or what went wrong; error: in words.
    shared_out: the server did not say which message had how many tokens.
    """

    due: float
    prompt_tokens: int
    output_tokens: int
    may_end_early: bool = False
    sent: float = 0.0
    ended: float = 0.0
    status: str = UNFINISHED
    error: str = ""
    cached_tokens: int = 0
    shared_out: bool = False
    times: array = field(default_factory=lambda: array("d"))
    counts: array = field(default_factory=lambda: array("I"))

    def saw(self, time: float, tokens: int) -> None:
        self.times.append(time)
        self.counts.append(tokens)

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def received(self) -> int:
        """Tokens."""
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        after = self.received - self.counts[0]
        return (self.times[-1] - self.times[0]) / after if after else None

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    def itl(self) -> list[float]:
        """Seconds, one for each token after the first message."""
        gaps = (later - earlier for earlier, later in pairwise(self.times))
        return [
            gap / count
            for gap, count in zip(gaps, self.counts[1:], strict=True)
            for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds; quantiles between two samples are interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(seconds: Iterable[float]) -> "Spread | None":
        """None without samples."""
        samples = np.fromiter(seconds, float)
        if not samples.size:
            return None
        figures = (samples.mean(), *np.quantile(samples, QUANTILES))
        return Spread(*(round(1e3 * float(value), 3) for value in figures))


@dataclass(frozen=True, slots=True)
class Objective:
    """The SLO of a request: the longest TTFT, TPOT and E2E in milliseconds; None is any."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @staticmethod
    def parse(text: str) -> "Objective":
        """From "ttft=500,tpot=50"; ConfigError for anything else."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, most = part.partition("=")
            found[name] = _number(most)
        if not set(found) <= {"ttft", "tpot", "e2e"} or not all(
            most > 0 for most in found.values()
        ):
            raise ConfigError(
                f"--slo {text!r}: give milliseconds above 0 for ttft, tpot or e2e, as "
                f"ttft=500,tpot=50"
            )
        return Objective(**found)

    def bounds(self) -> dict[str, float]:
        """Milliseconds by name, of those that there are."""
        return {name: most for name, most in asdict(self).items() if most is not None}

    def met(self, outcome: Outcome) -> bool:
        """A request that failed has not met it; one without a TPOT is judged by the others."""
        if not outcome.ok:
            return False
        found = ((name, getattr(outcome, name)) for name in self.bounds())
        return all(value is None or 1e3 * value <= self.bounds()[name] for name, value in found)


def _number(text: str) -> float:
    """Not a number where the text is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests that ended with the same status. example: what one of them was told."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are per second of the busy period, from the first request's sending to the last one's
    end.

    They count requests that ended OK, as do the tokens and all latencies. lag: how late requests
    were sent. goodput: requests/s that met the objective; goodput_share: of those that ended
    somehow. None: no objective, or no samples. shared_out: requests of which only the sum of the
    tokens is known, shared out evenly over the messages.
    """

    requests: int
    ok: int
    unfinished: int
    failures: dict[str, Failure]
    busy_seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    prompt_tokens: int
    cached_prompt_tokens: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    lag: Spread | None
    shared_out: int
    goodput: float | None
    goodput_share: float | None


def summarize(outcomes: Sequence[Outcome], objective: Objective) -> Summary:
    """outcomes: of requests that were sent, whatever became of them."""
    done = [o for o in outcomes if o.ok]
    ended = [o for o in outcomes if o.status != UNFINISHED]
    busy = max((o.ended for o in ended), default=0.0) - min((o.sent for o in ended), default=0.0)
    rates = (len(done), sum(o.received for o in done), sum(o.prompt_tokens for o in done))
    met = sum(map(objective.met, ended)) if objective.bounds() else None
    return Summary(
        len(outcomes),
        len(done),
        len(outcomes) - len(ended),
        _failures(ended),
        round(busy, 3),
        *(_per_second(count, busy) for count in rates),
        prompt_tokens=rates[2],
        cached_prompt_tokens=sum(o.cached_tokens for o in done),
        ttft=Spread.of(o.ttft for o in done),
        tpot=Spread.of(o.tpot for o in done if o.tpot is not None),
        itl=Spread.of(gap for o in done for gap in o.itl()),
        e2e=Spread.of(o.e2e for o in done),
        lag=Spread.of(o.sent - o.due for o in outcomes),
        shared_out=sum(o.shared_out for o in done),
        goodput=None if met is None else _per_second(met, busy),
        goodput_share=None if met is None or not ended else round(met / len(ended), 4),
    )


def _per_second(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds else 0.0


def _failures(ended: Sequence[Outcome]) -> dict[str, Failure]:
    counts = Counter(o.status for o in ended if not o.ok)
    examples = {o.status: o.error for o in reversed(ended)}
    return {status: Failure(count, examples[status]) for status, count in counts.most_common()}
