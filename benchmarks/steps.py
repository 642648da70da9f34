"""Share of the hardware's roofline that compiled steps reach, by batch.

    python -m benchmarks.steps [--model llama3.1-8b] [--layers 8] [--rows 1 --rows 8 ...] [--context
    2048] [--out FILE]
        [--weights int8 --weights int4-g128 ...] [--kv fp8 ...]

Random weights are made on the device, in every form of --weights; with each, all of --kv. A decode
step has `rows` rows at `context` positions, half a round before and half a round behind it; a
prefill step computes `--tokens` tokens of new prompts, shared out over the rows. The floor is
counted, not measured: every weight and every live page read once, over the bandwidth of memory; or
the products' FLOP, over the speed of a large product, if that is more. Both limits are measured in
the same run. With --out, results are written after every case.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.device import about, measure_limits, seconds
from benchmarks.models import NAMES, spec_of
from jaxserve.config import EIGHT_BITS, EngineConfig, EngineOptions, resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.host.plan_builder import admission_of
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import FED_BACK, Admission, LanePlan, StepKind, StepPlan
from jaxserve.loading.product import choose_product
from jaxserve.models.decoder import param_specs
from jaxserve.models.precision import AUTO
from jaxserve.models.quant import parse_scheme, scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.roofline import Case, work_of
from jaxserve.plan.topology import Limits
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import random_params


@dataclass(frozen=True)
class Result:
    """Figures of a step; milliseconds: of one; share: of the roofline."""

    case: Case
    weights: str
    kv: str
    milliseconds: float
    share: float
    intensity: float


def config_for(
    case: Case, launches: int, spec: ModelSpec, kv: str, dtype: jnp.dtype
) -> EngineConfig:
    """Return a configuration with room for the rows.

    It also has room for all tokens that the launches of a round add.
    """
    longest = case.context + (case.tokens // case.rows) * case.steps * (launches + 1)
    page_size = 128 if kv in EIGHT_BITS else 64
    span = -(-longest // page_size) * page_size
    options = EngineOptions(
        max_batch=case.rows,
        step_tokens=max(case.tokens, case.rows, case.steps),
        decode_steps=case.steps,
        max_context=longest,
        cache_tokens=case.rows * span,
        page_size=page_size,
        prefix_cache=False,
        kv=kv,
    )
    return resolve(
        options,
        max_positions=max(longest, spec.max_positions),
        lanes=1,
        affordable_tokens=case.rows * span,
        windows=[group.window for group in spec.page_groups()],
        weights=str(dtype),
    )


def admissions(config: EngineConfig, case: Case, length: int) -> list[Admission]:
    """Return greedy rows with all their pages, and `length` positions of zeros in them.

    Pages behind a window are shared.
    """
    count = config.pages_per_row
    request = Request(id="", prompt=(0,), params=SamplingParams(temperature=0))
    plain = admission_of(Sequence(0, request, index=0, seed=0, max_tokens=1))
    ids = [range(row * count, (row + 1) * count) for row in range(case.rows)]
    tables = [
        tuple(tuple(page % pool.pages for page in row) for pool in config.pools) for row in ids
    ]
    return [
        replace(plain, lane=0, row=row, length=length, tables=table)
        for row, table in enumerate(tables)
    ]


class Steps:
    """A runner whose rows are all busy.

    Every launch goes on from the one before, until `rewind`.
    """

    def __init__(self, spec: ModelSpec, params: dict, case: Case, launches: int, kv: str = "auto"):
        self.config = config_for(case, launches, spec, kv, params["embed"].dtype)
        mesh = MeshSpec().build(jax.devices())
        self.runner = DeviceRunner(spec, params, self.config, mesh)
        rows = case.rows
        bucket = (
            Bucket("decode", rows, rows, case.steps)
            if case.kind == "decode"
            else self._prefill(case)
        )
        self.runner.warm_up([bucket])
        size = case.steps if case.kind == "decode" else case.tokens // rows
        token = FED_BACK if case.kind == "decode" else 1
        samples = size if case.kind == "decode" else 1
        self._lane = LanePlan(
            *(list(range(rows)), list(range(rows)), [0] * rows, [size] * rows, [samples] * rows),
            tokens=[token] * (size * rows),
            targets=[0] * (size * rows),
        )
        self._kind: StepKind = case.kind
        self._steps = case.steps
        behind = launches * case.steps // 2 if case.kind == "decode" else 0
        self._admissions = admissions(self.config, case, max(case.context - behind, 0))

    def _prefill(self, case: Case) -> Bucket:
        return next(
            b
            for b in self.runner.buckets.buckets
            if b.kind == "prefill" and b.tokens >= case.tokens
        )

    def rewind(self) -> None:
        """Make the rows as long as they were."""
        for admission in self._admissions:
            self.runner.rows.admit(admission)
        self.runner.wait()

    def launch(self) -> jax.Array:
        return self.runner.launch(StepPlan(1, self._kind, (self._lane,), (), self._steps)).output


def measure(
    spec: ModelSpec, params: dict, case: Case, limits: Limits, repeats: int, kv: str = "auto"
) -> Result:
    steps = Steps(spec, params, case, repeats, kv)
    try:
        each = seconds(steps.launch, repeats, rounds=3, before=steps.rewind) / case.steps
    finally:
        steps.runner.release_state()
    dtype = params["embed"].dtype
    scheme = scheme_in(params)
    pages = steps.config
    work = work_of(spec, dtype, case, scheme=scheme, pages=jnp.dtype(pages.page_dtype))
    share = work.floor(limits) / each
    return Result(
        case,
        str(scheme or dtype),
        pages.kv,
        round(each * 1e3, 3),
        round(share, 3),
        round(work.intensity, 1),
    )


def show(results: list[Result], limits: Limits, picture: Path | None) -> None:
    """Show a table with a bar for every share, and write a picture where one is asked for."""
    title = (
        f"memory {limits.bandwidth / 1e9:.1f} GB/s, product {limits.flops / 1e9:.0f} "
        f"GFLOP/s, ridge {limits.ridge:.0f}"
    )
    columns = (
        "step",
        "weights",
        "pages",
        "rows",
        "context",
        "tokens",
        "ms",
        "speed-up",
        "FLOP per byte",
    )
    table = Table(*columns, "of the roofline", "", title=title)
    first = {r.case: r.milliseconds for r in reversed(results)}
    for r in results:
        kind = r.case.kind + (f" x {r.case.steps}" if r.case.steps > 1 else "")
        case = (kind, r.weights, r.kv, r.case.rows, r.case.context, r.case.tokens)
        measured = (f"{r.milliseconds:.2f}", f"{first[r.case] / r.milliseconds:.2f}", r.intensity)
        table.add_row(
            *map(str, case + measured), f"{r.share:.0%}", "█" * round(20 * min(r.share, 1))
        )
    console = Console(record=True)
    console.print(table)
    if picture:
        console.save_svg(str(picture), title="share of the roofline by batch")


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for rows in args.rows or (1, 8, 64, 256):
        if args.kind in (None, "decode"):
            yield Case("decode", rows, args.context, rows, args.decode_steps)
        if args.kind in (None, "prefill"):
            yield Case("prefill", rows, 0, args.tokens // rows * rows)


def measured(
    args: argparse.Namespace, spec: ModelSpec, dtype: jnp.dtype, limits: Limits
) -> Iterator[Result]:
    mesh = MeshSpec().build(jax.devices())
    for weights in args.weights or ("auto",):
        chosen = choose_product(AUTO, mesh)
        params = random_params(param_specs(spec, dtype, parse_scheme(weights), chosen), mesh)
        for kv, case in product(args.kv or ("auto",), cases(args)):
            yield measure(
                spec, params, case, limits, args.repeats if case.kind == "decode" else 1, kv
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", choices=NAMES, default="llama3.1-8b")
    parser.add_argument("--layers", type=int, help="only so many of the model's (default: all)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--weights", action="append", help="as of jaxserve.serve; default: auto, unquantized"
    )
    parser.add_argument(
        "--kv", action="append", help="as of jaxserve.serve; default: auto, the dtype"
    )
    parser.add_argument("--rows", action="append", type=int, help="default: 1, 8, 64 and 256")
    parser.add_argument(
        "--context", type=int, default=2048, help="positions of a decoding row (default 2048)"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a prefill step (default 2048)")
    parser.add_argument("--kind", choices=("decode", "prefill"), help="default: both")
    parser.add_argument(
        "--decode-steps", type=int, default=1, help="decodes per launch (default 1)"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--out", type=Path, help="write the results as JSON, and the table as a picture beside it"
    )
    args = parser.parse_args()
    spec = spec_of(args.model, args.layers)
    dtype = jnp.dtype(args.dtype)
    limits = measure_limits(dtype)
    results: list[Result] = []
    for result in measured(args, spec, dtype, limits):
        results.append(result)
        if args.out:
            shape = {"model": args.model, "layers": spec.num_layers, "dtype": args.dtype}
            account = about() | shape | {"limits": asdict(limits)}
            args.out.write_text(
                json.dumps(account | {"results": [asdict(r) for r in results]}, indent=1) + "\n"
            )
    show(results, limits, args.out and args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
