"""An estimate as charts: floors and ceilings by batch, and intensities against the chip's ridge."""

from collections.abc import Iterator

from jaxserve.plan.estimate import Estimate
from jaxserve.plan.plot import Chart, Line, picture
from jaxserve.plan.topology import Limits


def charts(estimate: Estimate) -> str:
    """Return the charts as SVG."""
    assert estimate.limits, "the topology has no published speed"
    return picture(list(_charts(estimate, estimate.limits)))


def _charts(estimate: Estimate, limits: Limits) -> Iterator[Chart]:
    d = estimate.deployment
    batches = list(estimate.batches(limits))
    name = f"{d.target.model} on {d.topology.name}"
    rates = Line("decode", "decode", [(b.streams, b.tokens_per_second) for b in batches])
    yield Chart(f"{name}: ceiling of output", "streams", "tokens/s", [rates])
    times = Line("decode", "decode", [(b.streams, b.tpot * 1e3) for b in batches])
    yield Chart(f"floor of TPOT, context {estimate.context}", "streams", "ms", [times])
    title = "FLOP per byte, and the chip's ridge in bfloat16"
    lines = list(_intensities(estimate, limits))
    yield Chart(title, "tokens of a step", "FLOP/byte", lines)


def _intensities(estimate: Estimate, limits: Limits) -> Iterator[Line]:
    buckets = [b for b in estimate.deployment.buckets if b.steps == 1 and b.kind != "score"]
    for kind in ("decode", "prefill"):
        points = [(b.tokens, estimate.work(b).intensity) for b in buckets if b.kind == kind]
        yield Line(kind, kind, points)
    ends = (0, max(b.tokens for b in buckets))
    yield Line("ridge", "ridge", [(tokens, limits.ridge) for tokens in ends], dashed=True)
