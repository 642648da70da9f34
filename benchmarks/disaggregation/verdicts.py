"""Verdicts: whether disaggregation pays, against chunks alone."""

from collections.abc import Iterator, Sequence

from benchmarks.disaggregation.measuring import Result
from jaxserve.bench.latency import Spread

WORTH = 0.9  # of p99 ITL with chunks alone: what is nearer is noise


def verdicts(results: Sequence[Result]) -> Iterator[str]:
    """Yield a verdict for each rate at which both arrangements were measured."""
    by_case = {(r.rate, r.arrangement): r for r in results}
    for rate in dict.fromkeys(r.rate for r in results):
        apart = by_case.get((rate, "disaggregated"))
        chunked = by_case.get((rate, "chunked"))
        if apart and chunked:
            yield f"{rate:g} long prompts/s: {verdict(apart, chunked)}"


def verdict(apart: Result, chunked: Result) -> str:
    """Return a sentence that says whether disaggregation pays, against chunks alone.

    It pays where p99 of ITL is a tenth shorter, and the median no longer.
    """
    itl = p99(apart.short.itl) / p99(chunked.short.itl)
    median = p50(apart.short.itl) / p50(chunked.short.itl)
    figures = {
        "p99 ITL": itl,
        "p50 ITL": median,
        "longest gaps": p99(apart.gaps) / p99(chunked.gaps),
        "p99 TTFT": p99(apart.short.ttft) / p99(chunked.short.ttft),
        "tokens/s": apart.all.output_tokens_per_second / chunked.all.output_tokens_per_second,
    }
    travelled = apart.handovers and apart.handovers.decisions.get("remote")
    worth = itl < WORTH and median <= 1 / WORTH
    pays = ("pays" if worth else "does not pay") if travelled else "has nothing to do"
    ratios = ", ".join(f"{name} x {value:.2f}" for name, value in figures.items())
    return f"disaggregation {pays}: {ratios}"


def p50(spread: Spread | None) -> float:
    """Return the median; not a number without samples, as every ratio with it then is."""
    return spread.p50 if spread else float("nan")


def p99(spread: Spread | None) -> float:
    """Return p99; not a number without samples, as every ratio with it then is."""
    return spread.p99 if spread else float("nan")
