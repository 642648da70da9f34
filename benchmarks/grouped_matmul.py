"""Speed of the grouped matrix product's implementations, beside the device's limits.

Figures are bytes and FLOP per second.

    python -m benchmarks.grouped_matmul [--experts 128 --per-token 8 --model 2048 --mlp 768] [--out
    FILE]

One mixture-of-experts layer's products, alone, for steps of so many tokens, routed at random. Bytes
are those of the weights of experts that have rows, of the rows and of results, each once; FLOP
those of rows, without padding.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from benchmarks.device import Limits, about, measure_limits, seconds
from jaxserve.pallas_kernels.dispatch import GROUPED, GROUPED_CANDIDATES
from jaxserve.pallas_kernels.grouped_matmul.api import Demand, GroupedMatmul, KernelError, Options
from jaxserve.pallas_kernels.grouped_matmul.grouping import arrange

XLA = "ragged_dot"  # XLA's own: a kernel on TPUs; on CPUs and GPUs every row times every expert


@dataclass(frozen=True)
class Product:
    """A product; parts: of weights [experts, parts, contracted, columns]."""

    name: str
    parts: int
    contracted: int
    columns: int


@dataclass(frozen=True)
class Layer:
    experts: int
    per_token: int
    model: int
    mlp: int

    @property
    def products(self) -> tuple[Product, Product]:
        return Product("up", 2, self.model, self.mlp), Product("down", 1, self.mlp, self.model)

    def ids(self, tokens: int) -> np.ndarray:
        """Return the expert of every assignment, `per_token` different ones for each token."""
        rng = np.random.default_rng(0)
        chosen = [rng.permutation(self.experts)[: self.per_token] for _ in range(tokens)]
        return np.concatenate(chosen).astype(np.int32)


@dataclass(frozen=True)
class Result:
    tokens: int
    product: str
    implementation: str
    block: int
    microseconds: float
    bytes_per_second: float
    flops: float


def kernel_call(
    kernel: GroupedMatmul, layer: Layer, product: Product, ids: np.ndarray, dtype: jnp.dtype
) -> tuple[int, Callable[[], jax.Array]]:
    """Return a kernel's block and a call of it; KernelError when it cannot do this."""
    kind = jax.devices()[0].device_kind
    options = Options(kernel.block_rows(dtype, len(ids) // layer.experts), dtype, kind)
    groups, _ = jax.jit(arrange, static_argnums=(1, 2))(ids, layer.experts, options.block)
    rows = len(groups.experts) * options.block
    sizes = rows, layer.experts, product.parts, product.contracted, product.columns
    kernel.check(options, Demand(*sizes, dtype, kind))
    x = jnp.ones((rows, product.contracted), dtype)
    weight = jnp.ones(sizes[1:], dtype)
    compiled = jax.jit(lambda x, weight, groups: kernel.multiply(x, weight, groups, options))
    return options.block, lambda: compiled(x, weight, groups)


def xla_call(
    layer: Layer, product: Product, ids: np.ndarray, dtype: jnp.dtype
) -> Callable[[], jax.Array]:
    """Return a call of XLA's product, with parts side by side and no padding."""
    columns = product.parts * product.columns
    x = jnp.ones((len(ids), product.contracted), dtype)
    weight = jnp.ones((layer.experts, product.contracted, columns), dtype)
    sizes = jnp.asarray(np.bincount(ids, minlength=layer.experts), jnp.int32)
    exact = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    compiled = jax.jit(
        lambda *operands: lax.ragged_dot(*operands, precision=exact, preferred_element_type=dtype)
    )
    return lambda: compiled(x, weight, sizes)


def measure(
    layer: Layer, product: Product, tokens: int, dtype: jnp.dtype, names: list[str]
) -> list[Result]:
    ids = layer.ids(tokens)
    numbers = len(np.unique(ids)) * product.parts * product.contracted * product.columns
    numbers += len(ids) * (product.contracted + product.parts * product.columns)
    flop = 2 * len(ids) * product.parts * product.contracted * product.columns
    results = []
    for name in names:
        try:
            block, call = (
                (1, xla_call(layer, product, ids, dtype))
                if name == XLA
                else kernel_call(GROUPED[name], layer, product, ids, dtype)
            )
        except KernelError as error:
            Console(stderr=True).print(f"{name}: {error}")
            continue
        each = seconds(call, 5)
        moved = numbers * dtype.itemsize / each
        results.append(
            Result(tokens, product.name, name, block, round(each * 1e6, 1), moved, flop / each)
        )
    return results


def show(results: list[Result], limits: Limits) -> None:
    table = Table(
        "tokens",
        "product",
        "implementation",
        "block",
        "us",
        "GB/s",
        "of memory",
        "GFLOP/s",
        "of a product",
    )
    for r in results:
        cells = (r.tokens, r.product, r.implementation, r.block, f"{r.microseconds:,.0f}")
        memory = f"{r.bytes_per_second / 1e9:,.1f}", f"{r.bytes_per_second / limits.bandwidth:.0%}"
        table.add_row(
            *map(str, cells), *memory, f"{r.flops / 1e9:,.0f}", f"{r.flops / limits.flops:.0%}"
        )
    Console().print(table)


def main() -> None:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grouped_matmul", description=summary
    )
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--model", type=int, default=2048)
    parser.add_argument("--mlp", type=int, default=768)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256, 2048])
    parser.add_argument("--xla", action="store_true", help="time lax.ragged_dot too")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after every step")
    args = parser.parse_args()
    layer = Layer(args.experts, args.per_token, args.model, args.mlp)
    dtype = jnp.dtype(args.dtype)
    limits = measure_limits(dtype)
    names = [*GROUPED_CANDIDATES[jax.devices()[0].platform], *([XLA] if args.xla else [])]
    results: list[Result] = []
    for tokens in args.tokens:
        for product in layer.products:
            results += measure(layer, product, tokens, dtype, names)
        if args.out:
            shape = asdict(layer) | {"dtype": args.dtype, "limits": asdict(limits)}
            args.out.write_text(
                json.dumps(about() | shape | {"results": [asdict(r) for r in results]}, indent=1)
                + "\n"
            )
    show(results, limits)


if __name__ == "__main__":
    main()
