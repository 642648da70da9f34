"""Speed and error of products with int4 in groups, beside the device's limits.

Figures are bytes and FLOP per second.

    python -m benchmarks.quantized_matmul [--model 4096 --mlp 14336 --group 128] [--out FILE]

A layer's gate_up and down alone, for steps of so many rows. Bytes are those of numbers, scales,
rows and results, each once; FLOP those of the product. Every result is compared with a float32
product of the dequantized weight: `error` is the largest difference, in parts of the sum of the
products' sizes. Beside them, a bfloat16 weight.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from rich.console import Console
from rich.table import Table

from benchmarks.device import Limits, about, measure_limits, seconds
from jaxserve.pallas_kernels.dispatch import QUANTIZED, QUANTIZED_CANDIDATES
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.quantized_matmul.api import Demand, Options
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import ParamSpec

PLAIN = "bfloat16"
BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)
WRONG = 2**-8  # of an error: twice what rounding every number to bfloat16 may come to


@dataclass(frozen=True)
class Weight:
    name: str
    axes: str
    shape: tuple[int, ...]
    group: int

    @property
    def columns(self) -> int:
        return int(np.prod(self.shape[1:]))


@dataclass(frozen=True)
class Result:
    rows: int
    weight: str
    implementation: str
    microseconds: float
    bytes_per_second: float
    flops: float
    error: float


@dataclass(frozen=True)
class Operands:
    numbers: jax.Array
    scales: jax.Array

    @classmethod
    def of(cls, weight: Weight) -> "Operands":
        """Return random operands, in the order that a model's weights have on this platform."""
        mesh = MeshSpec().build(jax.devices())
        rng = np.random.default_rng(0)

        def put(values: np.ndarray, dtype: jnp.dtype, summed: str = "") -> jax.Array:
            scheme: Format = ParamSpec(weight.axes, values.shape, dtype, summed=summed).format(mesh)
            return jax.device_put(values.astype(dtype), scheme)

        numbers = rng.integers(-7, 8, weight.shape, np.int8)
        scales = rng.uniform(0.5, 1.5, (weight.shape[0] // weight.group, *weight.shape[1:]))
        return cls(put(numbers, jnp.dtype(jnp.int4), weight.axes[0]), put(scales, F32))


@partial(jax.jit, static_argnames="dtype")
def dequantized(numbers: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    apart = numbers.reshape(len(scales), -1, *numbers.shape[1:]).astype(F32) * scales[:, None]
    return apart.reshape(numbers.shape).astype(dtype)


@partial(jax.jit, static_argnames="exact")
def product(x: jax.Array, weight: jax.Array, exact: bool) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if exact else None
    return jnp.einsum("TK,K...->T...", x, weight, precision=precision, preferred_element_type=F32)


def calls(weight: Weight, operands: Operands, x: jax.Array) -> dict[str, Callable[[], jax.Array]]:
    """Return calls by implementation; the reason of one that refuses is printed."""
    kind = jax.devices()[0].device_kind
    platform = jax.devices()[0].platform
    demand = Demand(weight.shape[0], weight.shape[1:], weight.group, BF16)
    found: dict[str, Callable[[], jax.Array]] = {}
    for name in QUANTIZED_CANDIDATES[platform]:
        kernel = QUANTIZED[name]
        options = Options(kind)
        try:
            kernel.check(options, demand)
        except KernelError as error:
            Console(stderr=True).print(f"{name}: {error}")
            continue
        found[name] = partial(
            jax.jit(partial(kernel.multiply, options=options)), x, operands.numbers, operands.scales
        )
    plain = dequantized(operands.numbers, operands.scales, BF16)
    return found | {PLAIN: lambda: product(x, plain, exact=False)}


def measure(weight: Weight, operands: Operands, rows: int) -> list[Result]:
    x = jax.random.normal(jax.random.key(0), (rows, weight.shape[0]), BF16)
    wide = dequantized(operands.numbers, operands.scales, F32)
    expected = product(x.astype(F32), wide, exact=True)
    size = product(jnp.abs(x.astype(F32)), jnp.abs(wide), exact=True)
    del wide
    numbers = weight.shape[0] * weight.columns
    beside = 2 * rows * weight.shape[0] + 4 * rows * weight.columns
    results = []
    for name, call in calls(weight, operands, x).items():
        error = float(jnp.max(jnp.abs(call() - expected) / size))
        if not error < WRONG:
            Console().print(f"WRONG: {name}, {weight.name}, {rows} rows: {error:.2e}")
        each = seconds(call, 5)
        kept = 2 * numbers if name == PLAIN else numbers // 2 + 4 * numbers // weight.group
        speed = (kept + beside) / each, 2 * rows * numbers / each
        results.append(Result(rows, weight.name, name, round(each * 1e6, 1), *speed, error))
    return results


def show(results: list[Result], limits: Limits) -> None:
    table = Table(
        "rows",
        "weight",
        "implementation",
        "us",
        "GB/s",
        "of memory",
        "GFLOP/s",
        "of a product",
        "error",
    )
    for r in results:
        memory = f"{r.bytes_per_second / 1e9:,.1f}", f"{r.bytes_per_second / limits.bandwidth:.0%}"
        speed = f"{r.flops / 1e9:,.0f}", f"{r.flops / limits.flops:.0%}"
        table.add_row(
            str(r.rows),
            r.weight,
            r.implementation,
            f"{r.microseconds:,.0f}",
            *memory,
            *speed,
            f"{r.error:.1e}",
        )
    Console().print(table)


def main() -> None:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized_matmul", description=summary
    )
    parser.add_argument("--model", type=int, default=4096)
    parser.add_argument("--mlp", type=int, default=14336)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 2048])
    parser.add_argument("--out", type=Path, help="write the results as JSON, after every step")
    args = parser.parse_args()
    weights = [
        Weight("gate_up", "DCF", (args.model, 2, args.mlp), args.group),
        Weight("down", "FD", (args.mlp, args.model), args.group),
    ]
    limits = measure_limits(BF16)
    results = list[Result]()
    for weight in weights:
        operands = Operands.of(weight)
        for rows in args.rows:
            results += measure(weight, operands, rows)
            if args.out:
                shape = {"group": args.group, "limits": asdict(limits)}
                args.out.write_text(
                    json.dumps(
                        about() | shape | {"results": [asdict(r) for r in results]}, indent=1
                    )
                    + "\n"
                )
    show(results, limits)


if __name__ == "__main__":
    main()
