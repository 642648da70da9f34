"""Products of float32 matrices on Hopper's tensor cores, from parts in bfloat16.

A float32 number has 24 leading bits, and bfloat16 has 8: three parts are the number itself. Of the
nine products of two numbers' parts, the six that reach the 24th bit are added up in float32, the
small ones first. A product of plain bfloat16 or tf32 would have 8 or 11 bits.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

PARTS: Final = 3
LEADING: Final = 0xFFFF0000  # bits of a float32 that bfloat16 has
# Parts that are multiplied with each other, the smallest products first.
PAIRS: Final = [(nth, last - nth) for last in reversed(range(PARTS)) for nth in range(last + 1)]
# Their numbers, of PAIR_BITS bits each, in a constant: a loop over the pairs takes them from there.
PAIR_BITS: Final = 2
PAIR_MASK: Final = 3
LEFT, RIGHT = (
    sum(pair[side] << PAIR_BITS * at for at, pair in enumerate(PAIRS)) for side in (0, 1)
)

Part = Callable[[Any], Any]  # function from a part's number to the part in shared memory


def parts_of(x: Float[Array, "*n"]) -> BFloat16[Array, "p *n"]:
    """Return the leading bits of float32 numbers, those behind them, and the rest."""
    found = []
    for _ in range(PARTS):
        leading = _leading(x)
        found.append(leading.astype(jnp.bfloat16))
        x = x - leading
    return jnp.stack(found)


def store(buffer: Any, x: Float[Array, "m n"]) -> None:
    """Write the parts of a matrix into shared memory [PARTS, m, n], for products."""

    def one(nth: jax.Array, rest: jax.Array) -> jax.Array:
        leading = _leading(rest)
        buffer[nth] = leading.astype(jnp.bfloat16)
        return rest - leading

    lax.fori_loop(0, PARTS, one, x)
    plgpu.commit_smem()


def _leading(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return numbers with the bits alone that bfloat16 has.

    Bits are cut off, not rounded: XLA takes a conversion to bfloat16 and back for none at all, and
    a NaN has to stay one.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(LEADING)
    return lax.bitcast_convert_type(bits, jnp.float32)


def each(buffer: Any) -> Part:
    """Return the parts in a buffer [PARTS, m, n]."""
    return lambda nth: buffer.at[nth]


def turned(buffer: Any) -> Part:
    """Return the transposed parts in a buffer [PARTS, m, n]."""
    return lambda nth: buffer.at[nth].T


def product(*factors: tuple[Part, Part]) -> jax.Array:
    """Return the sum of float32 products of matrices in shared memory, given as their parts."""

    def multiply(total: Any) -> jax.Array:
        def one(nth: jax.Array, _: None) -> None:
            left, right = ((numbers >> (PAIR_BITS * nth)) & PAIR_MASK for numbers in (LEFT, RIGHT))
            for x, y in factors:
                plgpu.wgmma(total, x(left), y(right))

        # A loop, since addresses of unrolled products would be kept in registers.
        lax.fori_loop(0, len(PAIRS), one, None)
        return total[...]

    x, y = (part(0) for part in factors[0])
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((x.shape[0], y.shape[1]), jnp.float32))
