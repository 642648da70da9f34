"""A ranking of meshes and precisions as a table for people, and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxserve.plan.report import GIB
from jaxserve.plan.suggest import Choice, Ranked
from jaxserve.sharding.mesh import MeshSpec

COLUMNS = ("GiB of cache", "tokens of it", "streams", "tokens/s", "TPOT alone, ms")
CAPTION = (
    "mesh: data x expert x tensor; tokens/s, TPOT and USD: of floors and of what is sent "
    "beside them"
)


def ranking_table(ranked: Sequence[Ranked], rest: Sequence[Choice]) -> Table:
    """Return the table of what fits, and below it what does not."""
    priced = any(r.batch.usd is not None for r in ranked)
    shown = Table(box=SIMPLE_HEAD, caption=CAPTION)
    for name in ("mesh", "weights", "pages", "attention"):
        shown.add_column(name, no_wrap=True)
    for name in (*COLUMNS, *(("USD/M",) if priced else ())):
        shown.add_column(name, justify="right")
    shown.add_column("", no_wrap=True)
    for r in ranked:
        shown.add_row(*_cells(r))
    for choice in rest:
        lacks = f"lacks {choice.missing / GIB:.2f} GiB" if choice.missing else "too small a cache"
        kept = choice.precision
        shown.add_row(
            _mesh(choice.axes), kept.weights, kept.kv, "", *[""] * (len(COLUMNS) + priced), lacks
        )
    return shown


def _cells(r: Ranked) -> Iterator[str]:
    config = r.estimate.deployment.config
    yield from (_mesh(r.choice.axes), r.choice.precision.weights, config.kv, config.attention)
    yield from (f"{r.estimate.cache / GIB:.2f}", f"{r.estimate.lane_tokens * config.lanes:,}")
    yield from (f"{r.batch.streams:,}", f"{r.tokens_per_second:,.0f}", f"{r.tpot * 1e3:.3f}")
    usd = r.estimate.usd(r.tokens_per_second)
    if usd is not None:
        yield f"{usd:.3f}"
    yield "compiled" if r.estimate.steps else "counted"


def _mesh(axes: MeshSpec) -> str:
    return f"{axes.data} x {axes.expert} x {axes.tensor}"


def ranking_json(ranked: Sequence[Ranked], rest: Sequence[Choice]) -> list[dict[str, Any]]:
    """Return what fits, and after it what does not, in bytes, seconds and USD."""
    fitting = [
        _choice_json(r.choice, fits=True)
        | {
            "kv": r.estimate.deployment.config.kv,
            "compiled": bool(r.estimate.steps),
            "attention": r.estimate.deployment.config.attention,
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
    axes = choice.axes
    mesh = {"data": axes.data, "expert": axes.expert, "tensor": axes.tensor}
    return {
        "mesh": mesh,
        "weights": choice.precision.weights,
        "kv": choice.precision.kv,
        "fits": fits,
    }
