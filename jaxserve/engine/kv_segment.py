"""Piece: what travels of a KV cache from one engine to another, whatever pages and mesh each of
them has.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Shaped

from jaxserve.errors import EngineError


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Keys and values of the tokens [start, stop) of a prompt, in all layers of one page group.

    Canonical: token after token, whatever the page size was; the heads of all shards, each once, in
    the model's order. L: layers of the group, in the model's order. T: tokens. K: the model's own
    kv heads. H: numbers of a key or value, as pages hold them. Arrays are C-contiguous, and
    read-only to whoever gets the piece.

    group: index in ModelSpec.page_groups(). k, v: float32, bfloat16, int8 or float8_e4m3fn
    (ml_dtypes' where numpy has none), both the same; v is None for latent pages, whose value is a
    part of k (K is 1 then). k_scale, v_scale: float32, of 8-bit numbers; None of the others, and
    v_scale where v is None. EngineError where shapes or dtypes contradict each other, or start is
    negative.
    """

    group: int
    start: int
    k: Shaped[np.ndarray, "L T K H"]
    v: Shaped[np.ndarray, "L T K H"] | None = None
    k_scale: Float32[np.ndarray, "L T K"] | None = None
    v_scale: Float32[np.ndarray, "L T K"] | None = None

    def __post_init__(self) -> None:
        alike = self.v is None or (self.v.shape, self.v.dtype) == (self.k.shape, self.k.dtype)
        scaled = (self.k.dtype.itemsize == 1) == (self.k_scale is not None)
        paired = (self.v_scale is None) == (self.v is None or self.k_scale is None)
        scales = [scale for scale in (self.k_scale, self.v_scale) if scale is not None]
        fitting = all(
            (scale.shape, scale.dtype) == (self.k.shape[:-1], np.float32) for scale in scales
        )
        if self.start < 0 or self.k.ndim != 4 or not (alike and scaled and paired and fitting):
            arrays = ", ".join(
                f"{name} {x.dtype}{list(x.shape)}" for name, x in self.arrays.items()
            )
            raise EngineError(
                f"from token {self.start} on, these are no keys and values of a page group: "
                f"{arrays}"
            )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Those that there are, by field, in the fields' order."""
        fields = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: array for name, array in fields.items() if array is not None}

    @property
    def stop(self) -> int:
        return self.start + self.k.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())
