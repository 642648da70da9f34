"""Outcomes of requests as the client sees them, and their latency, throughput and goodput.

Clock readings are seconds of one monotonic clock (time.monotonic), taken when a message was read.
For each request:

- TTFT: from sending the request to the first message with tokens;
- TPOT: from the first message with tokens to the last, divided by the tokens after the first
  message; undefined if there are none;
- E2E: from sending the request to the end of its stream.

Inter-token latency (ITL) belongs to a token: the gap between its message and the one before,
divided by the tokens of its message. Tokens of the first message have none. A server that sends
several tokens at a time thus has the ITL of one that sends them evenly; TTFT and E2E show the
difference.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np

from jaxserve.flag_errors import flag_error

OK = "OK"
UNFINISHED = "UNFINISHED"
QUANTILES = 0.5, 0.9, 0.99


@dataclass(slots=True)
class Outcome:
    """Outcome of one request."""

    due: float  # clock reading
    prompt_tokens: int
    output_tokens: int  # tokens that were asked for; an upper bound if may_end_early
    may_end_early: bool = False
    deadline: float | None = None  # seconds that the server was given; None: any
    sent: float = 0.0  # clock reading
    ended: float = 0.0  # clock reading
    # OK; UNFINISHED until the request ends, for ever if it is given up; or the failure in a word.
    status: str = UNFINISHED
    error: str = ""  # the failure in a sentence
    # Seconds after which the server wants to be asked again; None: it did not say.
    retry_after: float | None = None
    cached_tokens: int = 0
    # The server did not say which message had how many tokens, so they were shared out evenly.
    shared_out: bool = False
    times: array = field(default_factory=lambda: array("d"))  # clock reading of each message
    counts: array = field(default_factory=lambda: array("I"))  # number of tokens of each message

    def saw(self, time: float, tokens: int) -> None:
        """Note a message with this many tokens."""
        self.times.append(time)
        self.counts.append(tokens)

    @property
    def ok(self) -> bool:
        """True if the request got what it asked for."""
        return self.status == OK

    @property
    def received(self) -> int:
        """Tokens that arrived."""
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """Seconds to the first message with tokens."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first message; None if there are no such tokens."""
        later = self.received - self.counts[0]
        return (self.times[-1] - self.times[0]) / later if later else None

    @property
    def e2e(self) -> float:
        """Seconds to the end of the stream."""
        return self.ended - self.sent

    def itl(self) -> list[float]:
        """Return the inter-token latency in seconds of each token after the first message."""
        found: list[float] = []
        for (earlier, later), count in zip(pairwise(self.times), self.counts[1:], strict=True):
            found += [(later - earlier) / count] * count
        return found


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles in milliseconds; quantiles between two samples are interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(seconds: Iterable[float]) -> "Spread | None":
        """Return the spread of samples in seconds; None without samples."""
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
        """Return the objective of a text like "ttft=500,tpot=50"; ConfigError for other texts."""
        parts = (part.partition("=") for part in text.split(","))
        found = {name: _number(limit) for name, _, limit in parts}
        are_known = set(found) <= {"ttft", "tpot", "e2e"}
        if not are_known or not all(limit > 0 for limit in found.values()):
            problem = "give milliseconds above 0 for ttft, tpot or e2e, as ttft=500,tpot=50"
            raise flag_error("--slo", text, problem)
        return Objective(**found)

    def bounds(self) -> dict[str, float]:
        """Return the bounds that there are, in milliseconds by name."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def met(self, outcome: Outcome) -> bool:
        """Return whether a request met all bounds; one on a TPOT that it lacks does not count."""
        if not outcome.ok:
            return False
        found = ((name, getattr(outcome, name)) for name in self.bounds())
        return all(value is None or 1e3 * value <= self.bounds()[name] for name, value in found)


def _number(text: str) -> float:
    """Return the number of a text; NaN for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests that ended with the same status; example is the error of one of them."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run.

    Rates are per second of the busy period: from sending the first request to the end of the last.
    Rates, tokens and latencies count requests that ended OK. A spread is None without samples.
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
    lag: Spread | None  # how late requests were sent
    shared_out: int  # requests of which only the sum of the tokens is known
    goodput: float | None  # requests/s that met the objective; None without an objective
    # Share of the requests that met the objective in all that ended; None without an objective.
    goodput_share: float | None


def summarize(outcomes: Sequence[Outcome], objective: Objective) -> Summary:
    """Return the figures of all requests that were sent, failed ones included."""
    done = [o for o in outcomes if o.ok]
    ended = [o for o in outcomes if o.status != UNFINISHED]
    busy = max((o.ended for o in ended), default=0.0) - min((o.sent for o in ended), default=0.0)
    prompt_tokens = sum(o.prompt_tokens for o in done)
    met = sum(map(objective.met, ended)) if objective.bounds() else None
    return Summary(
        requests=len(outcomes),
        ok=len(done),
        unfinished=len(outcomes) - len(ended),
        failures=failures_of(ended),
        busy_seconds=round(busy, 3),
        requests_per_second=_per_second(len(done), busy),
        output_tokens_per_second=_per_second(sum(o.received for o in done), busy),
        prompt_tokens_per_second=_per_second(prompt_tokens, busy),
        prompt_tokens=prompt_tokens,
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


def failures_of(ended: Sequence[Outcome]) -> dict[str, Failure]:
    """Return the requests that failed, by status."""
    counts = Counter(o.status for o in ended if not o.ok)
    examples = {o.status: o.error for o in reversed(ended)}
    return {status: Failure(count, examples[status]) for status, count in counts.most_common()}
