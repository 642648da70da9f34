"""An account as a picture: how floors and ceilings go with the batch, and where steps stand to the
ridge.
"""

from collections.abc import Iterator

from jaxserve.plan.estimate import Account
from jaxserve.plan.plot import Chart, Line, picture
from jaxserve.plan.roofline import Limits


def charts(account: Account) -> str:
    """SVG; of a topology whose speed is published."""
    assert account.limits
    return picture(list(_charts(account, account.limits)))


def _charts(account: Account, limits: Limits) -> Iterator[Chart]:
    d, batches = account.deployment, list(account.batches(limits))
    name = f"{d.target.model} on {d.topology.name}"
    rates = [(b.streams, b.tokens_per_second) for b in batches]
    yield Chart(
        f"{name}: ceiling of output", "streams", "tokens/s", [Line("decode", "decode", rates)]
    )
    times = [(b.streams, b.tpot * 1e3) for b in batches]
    yield Chart(
        f"floor of TPOT, context {account.context}",
        "streams",
        "ms",
        [Line("decode", "decode", times)],
    )
    yield Chart(
        "FLOP per byte, and the chip's ridge in bfloat16",
        "tokens of a step",
        "FLOP/byte",
        list(_intensities(account, limits)),
    )


def _intensities(account: Account, limits: Limits) -> Iterator[Line]:
    buckets = [b for b in account.deployment.buckets if b.steps == 1 and b.kind != "score"]
    for kind in ("decode", "prefill"):
        points = [(b.tokens, account.work(b).intensity) for b in buckets if b.kind == kind]
        yield Line(kind, kind, points)
    ends = (0, max(b.tokens for b in buckets))
    yield Line("ridge", "ridge", [(tokens, limits.ridge) for tokens in ends], dashed=True)
