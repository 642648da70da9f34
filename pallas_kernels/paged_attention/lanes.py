"""Where a token's key and value lie beside each other in the lanes of a page on a TPU."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.api import Layout

TILE_LANES = 128  # of a vector register


def lane_multiple(n: int) -> int:
    return -(-n // TILE_LANES) * TILE_LANES


def sublanes(dtype: jnp.dtype) -> int:
    """Rows of a tile of memory, the largest of any chip's: copies begin and end at multiples of
    it."""
    return 32 // jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class Lanes:
    """total: of a page. Queries meet lanes 0:keys of it, weights lanes values:values + value_lanes;
    of their product lanes out:out + V are the result.

    Key and value begin at multiples of 128 lanes; small ones share 128 of them, and there a query
    has zeros for the value and the result a part that nobody reads. Of a latent page the value is
    the beginning of the key.
    """

    total: int
    keys: int
    values: int
    value_lanes: int
    out: int

    @staticmethod
    def of(layout: Layout) -> "Lanes":
        dim = layout.head_dim
        if layout.value_dim is not None:
            return Lanes(
                lane_multiple(dim), lane_multiple(dim), 0, lane_multiple(layout.value_dim), 0
            )
        if 2 * dim <= TILE_LANES:
            return Lanes(TILE_LANES, TILE_LANES, 0, TILE_LANES, TILE_LANES // 2)
        half = lane_multiple(dim)
        return Lanes(2 * half, half, half, half, 0)

    @property
    def value_at(self) -> int:
        """The lane where a value begins."""
        return self.values + self.out


def widen(x: Float[Array, "*n H"], lanes: int) -> Float[Array, "*n C"]:
    """With zeros behind."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lanes - x.shape[-1])])


def pack(
    k: Float[Array, "*n H"], v: Float[Array, "*n H"] | None, layout: Layout
) -> Float[Array, "*n C"]:
    """A token's lanes, zeros where neither key nor value is."""
    lanes = Lanes.of(layout)
    if v is None:
        return widen(k, lanes.total)
    return jnp.concatenate(
        [widen(k, lanes.value_at), widen(v, lanes.total - lanes.value_at)], axis=-1
    )


def unpack(x: Float[Array, "*n C"], layout: Layout) -> tuple[jax.Array, jax.Array | None]:
    """The inverse of `pack`."""
    at = Lanes.of(layout).value_at
    dim = layout.head_dim
    return x[..., :dim], None if layout.value_dim is not None else x[..., at : at + dim]
