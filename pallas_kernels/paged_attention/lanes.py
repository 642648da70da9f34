"""Placement of a token's key and value side by side in the lanes of a page on a TPU."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.pallas_kernels.paged_attention.api import Layout

TILE_LANES = 128  # lanes of a vector register, and of a tile of memory


def lane_multiple(n: int) -> int:
    """Return n rounded up to whole registers."""
    return -(-n // TILE_LANES) * TILE_LANES


def sublanes(dtype: jnp.dtype) -> int:
    """Return the rows of a tile of memory, at whose multiples copies begin and end.

    Chips differ; this is the largest of any.
    """
    return 32 // jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class Lanes:
    """Lanes of a page that hold the key and the value of a token.

    Queries are multiplied with lanes 0:keys, and softmax weights with lanes values:values +
    value_lanes; in the product of the latter, lanes out:out + V are the result.

    Key and value begin at multiples of 128 lanes. Where both fit into 128, they share them: a query
    then has zeros in the value's lanes, and the key's part of the result is not read. In a latent
    page the value is the beginning of the key.
    """

    total: int  # C, the lanes of a page
    keys: int
    values: int
    value_lanes: int
    out: int

    @staticmethod
    def of(layout: Layout) -> "Lanes":
        """Return the placement for pages of this layout."""
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
        """Return the lane at which a value begins."""
        return self.values + self.out


def widen(x: Float[Array, "*n H"], lanes: int) -> Float[Array, "*n C"]:
    """Return x with zeros appended up to so many lanes."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lanes - x.shape[-1])])


def pack(
    k: Float[Array, "*n H"], v: Float[Array, "*n H"] | None, layout: Layout
) -> Float[Array, "*n C"]:
    """Return a token's lanes, with zeros in those that neither key nor value occupies."""
    lanes = Lanes.of(layout)
    if v is None:
        return widen(k, lanes.total)
    return jnp.concatenate(
        [widen(k, lanes.value_at), widen(v, lanes.total - lanes.value_at)], axis=-1
    )


def unpack(x: Float[Array, "*n C"], layout: Layout) -> tuple[jax.Array, jax.Array | None]:
    """Return key and value from a token's lanes: the inverse of `pack`."""
    at = Lanes.of(layout).value_at
    dim = layout.head_dim
    return x[..., :dim], None if layout.value_dim is not None else x[..., at : at + dim]
