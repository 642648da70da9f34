"""A ranking of meshes and precisions as a table for people, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxserve.plan.report import GIB
from jaxserve.plan.suggest import Choice, Ranked

COLUMNS = ("GiB", "streams", "tokens/s", "TPOT, ms")
CAPTION = (
    "mesh: data x expert x tensor. GiB: of cache on a device. tokens/s, TPOT of a lone stream, and "
    "USD: of floors and of what is sent beside them, counted unless compiled is said."
)
REFERENCES = "*: without a kernel on this chip; the bytes are those that the reference moves."


def ranking_table(ranked: Sequence[Ranked], rest: Sequence[Choice], most: int | None) -> Table:
    """Return the table of what fits, and below it what does not.

    The table has `most` rows at most, the best ones; None for all.
    """
    priced = any(r.batch.usd is not None for r in ranked)
    shown = Table(box=SIMPLE_HEAD, caption_justify="left", padding=0, show_edge=False)
    for name in ("mesh", "weights", "pages"):
        shown.add_column(name, no_wrap=True)
    for name in (*COLUMNS, *(("USD/M",) if priced else ())):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("", overflow="fold")
    best = ranked[:most]
    for r in best:
        shown.add_row(*_cells(r))
    others = rest if most is None else rest[: most - len(best)]
    no_figures = [""] * (len(COLUMNS) + priced)
    for choice in others:
        lacks = f"lacks {choice.missing / GIB:.2f} GiB" if choice.missing else "too small a cache"
        kept = choice.precision
        shown.add_row(str(choice.axes), kept.weights, kept.kv, *no_figures, lacks)
    shown.caption = "\n".join(_captions(best, len(ranked) + len(rest) - len(best) - len(others)))
    return shown


def _captions(best: Sequence[Ranked], hidden: int) -> Iterator[str]:
    yield CAPTION
    if any(r.estimate.deployment.references for r in best):
        yield REFERENCES
    if hidden:
        yield f"{hidden} more with --all."


def _cells(r: Ranked) -> Iterator[str]:
    config = r.estimate.deployment.config
    yield from (str(r.choice.axes), r.choice.precision.weights, config.kv)
    yield from (f"{r.estimate.cache / GIB:.1f}", f"{r.batch.streams:,}")
    yield from (f"{r.tokens_per_second:,.0f}", f"{r.tpot * 1e3:.3f}")
    usd = r.estimate.usd(r.tokens_per_second)
    if usd is not None:
        yield f"{usd:.3f}"
    yield ", ".join(_notes(r))


def _notes(r: Ranked) -> Iterator[str]:
    """Yield what a row has to say beside its numbers: that it was compiled, missing kernels."""
    if r.estimate.steps:
        yield "compiled"
    for name in r.estimate.deployment.references:
        yield f"{name}*"


def ranking_json(ranked: Sequence[Ranked], rest: Sequence[Choice]) -> list[dict[str, Any]]:
    """Return what fits, and after it what does not, in bytes, seconds and USD."""
    fitting = [
        _choice_json(r.choice, fits=True)
        | {
            "kv": r.estimate.deployment.config.kv,
            "compiled": bool(r.estimate.steps),
            "attention": r.estimate.deployment.config.attention,
            "reference": r.estimate.deployment.references,
            "cache": r.estimate.cache,
            "tokens_per_lane": r.estimate.lane_tokens,
            "streams": r.batch.streams,
            "tokens_per_second": r.tokens_per_second,
            "tpot": r.tpot,
            "usd": r.estimate.usd(r.tokens_per_second),
        }
        for r in ranked
    ]
    return fitting + [
        _choice_json(choice, fits=False) | {"missing": choice.missing} for choice in rest
    ]


def _choice_json(choice: Choice, fits: bool) -> dict[str, Any]:
    return {
        "mesh": asdict(choice.axes),
        "weights": choice.precision.weights,
        "kv": choice.precision.kv,
        "fits": fits,
    }
