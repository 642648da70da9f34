"""Products of few rows with weights on a CPU: XLA's own, and those of jaxserve.cpu_kernels.

    python -m benchmarks.cpu_products [--rows 1] [--numbers bfloat16] [--out FILE]

A pass multiplies by the weights of 12 MLPs of 1,024 x 4,864, so that nothing stays in a cache: as
`in_out`, the way jaxserve declares weights, and as `out_in`, the way checkpoints have them. The
kernel takes the latter. All forms take turns; milliseconds are the median of the passes, GB/s the
weights' bytes over it. Every form is compared with float64 first. XLA multiplies one row of
bfloat16 or int8 as two, as the engine does.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from benchmarks.device import versions
from benchmarks.offline.results import processor
from jaxserve.cpu_kernels.library import supported
from jaxserve.cpu_kernels.products import multiply

NARROW = 1024
WIDE = 4864
MLPS = 12
NUMBERS = ("bfloat16", "float32", "int8")
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-5, "int8": 0.0}  # of the largest result

Product = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Form:
    """A way to multiply, and whether its weights lie as [out, in]."""

    name: str
    multiply: Product
    out_in: bool


@dataclass(frozen=True)
class Result:
    numbers: str
    rows: int
    form: str
    milliseconds: float
    spread: float  # of the middle half of the passes, over the median
    bytes_per_second: float


def forms(numbers: str) -> list[Form]:
    """Return the forms that multiply these numbers."""
    sums = jnp.int32 if numbers == "int8" else jnp.float32
    exact = lax.Precision.HIGHEST if numbers == "float32" else None
    fewest = 1 if numbers == "float32" else 2

    def by_xla(out_in: bool) -> Form:
        summed = ((1,), (1 if out_in else 0,))

        def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, max(fewest - len(x), 0)), (0, 0)))
            return lax.dot_general(
                padded, weight, (summed, ((), ())), exact, preferred_element_type=sums
            )[: len(x)]

        return Form("XLA " + ("out_in" if out_in else "in_out"), multiply, out_in)

    def by_kernel(instructions: str) -> Form:
        return Form(instructions, partial(multiply, instructions=instructions), True)

    return [by_xla(False), by_xla(True), *map(by_kernel, supported())]


def draw(numbers: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Draw numbers; int8 ones use their whole range."""
    rng = np.random.default_rng(seed)
    if numbers == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    return rng.normal(size=shape).astype(np.float32).astype(jnp.dtype(numbers))


def check(form: Form, numbers: str, rows: int) -> None:
    """Compare a product with float64; SystemExit where they differ."""
    x = draw(numbers, (rows, NARROW), 1)
    weight = draw(numbers, (NARROW, WIDE), 2)
    expected = x.astype(np.float64) @ weight.astype(np.float64)
    kept = np.ascontiguousarray(weight.T) if form.out_in else weight
    found = np.asarray(jax.jit(form.multiply)(x, kept), np.float64)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    if error > TOLERANCE[numbers]:
        raise SystemExit(f"{form.name} of {rows} rows in {numbers} is wrong by {error:.1e}")


def passes(form: Form, numbers: str, rows: int) -> Callable[[], jax.Array]:
    """Return a compiled pass through all MLPs."""
    dtype = jnp.dtype(numbers)

    def weights(shape: tuple[int, int]) -> list[jax.Array]:
        stored = (shape[1], shape[0]) if form.out_in else shape
        return [jnp.asarray(draw(numbers, stored, seed)) for seed in range(MLPS)]

    def narrowed(y: jax.Array) -> jax.Array:
        """Bring results into the numbers' range, so that none can be left out."""
        if numbers == "int8":
            return (y >> 16).astype(dtype)
        return (y / (1 + jnp.abs(y))).astype(dtype)

    def run(x: jax.Array, ups: list[jax.Array], downs: list[jax.Array]) -> jax.Array:
        for up, down in zip(ups, downs, strict=True):
            x = narrowed(form.multiply(narrowed(form.multiply(x, up)), down))
        return x

    x = jnp.asarray(draw(numbers, (rows, NARROW), 3))
    operands = x, weights((NARROW, WIDE)), weights((WIDE, NARROW))
    compiled = jax.jit(run).lower(*operands).compile()
    return lambda: compiled(*operands)


def measure(numbers: str, rows: int, repeats: int) -> list[Result]:
    """Time all forms in turns."""
    found = forms(numbers)
    for form in found:
        check(form, numbers, rows)
    runs = [passes(form, numbers, rows) for form in found]
    seconds: list[list[float]] = [[] for _ in found]
    for _ in range(repeats + 2):
        for run, times in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - began)
    read = MLPS * 2 * NARROW * WIDE * jnp.dtype(numbers).itemsize
    results = []
    for form, times in zip(found, seconds, strict=True):
        middle = statistics.median(times[2:])
        low, _, high = statistics.quantiles(times[2:])
        spread = (high - low) / middle
        results.append(
            Result(
                numbers, rows, form.name, round(middle * 1e3, 2), round(spread, 2), read / middle
            )
        )
    return results


def show(results: list[Result]) -> None:
    table = Table("numbers", "rows", "form", "ms", "GB/s", "spread")
    for r in results:
        figures = f"{r.milliseconds:.1f}", f"{r.bytes_per_second / 1e9:.1f}", f"{r.spread:.0%}"
        table.add_row(r.numbers, str(r.rows), r.form, *figures)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_products", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", action="append", type=int, help="default: 1, 2, 4, 8, 16, 64")
    parser.add_argument("--numbers", action="append", choices=NUMBERS, help="default: all")
    parser.add_argument("--repeats", type=int, default=15, help="passes of each form")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    about = processor()
    results: list[Result] = []
    for numbers in args.numbers or NUMBERS:
        for rows in args.rows or (1, 2, 4, 8, 16, 64):
            results += measure(numbers, rows, args.repeats)
    show(results)
    if args.out:
        account = about | versions()
        account |= {"results": [asdict(result) for result in results]}
        args.out.write_text(json.dumps(account, indent=1) + "\n")


if __name__ == "__main__":
    main()
