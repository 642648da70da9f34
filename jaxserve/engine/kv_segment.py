"""KVSegment: the part of a KV cache that travels between engines of any page size and mesh."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Shaped

from jaxserve.errors import EngineError


@dataclass(frozen=True, eq=False, slots=True)
class KVSegment:
    """Keys and values of the tokens [start, stop) of a prompt, in all layers of one page group.

    The layout is canonical: token after token, whatever the page size was, and the heads of all
    shards once each, in the model's order. Axes: L layers of the group, in the model's order; T
    tokens; K the model's own kv heads; H numbers of a key and V numbers of a value, as pages hold
    them. Arrays are C-contiguous, and read-only to the receiver of the segment. Raises EngineError
    if shapes or dtypes contradict each other, or start is negative.

    Layers with recurrent states have a segment of the one state behind the token at `start`: T is
    1, K counts the state's heads, and `k` has all numbers of a head, float32.
    """

    group: int  # index in ModelSpec.page_groups(), which the group of states comes behind
    start: int
    # Float32, bfloat16, int8 or float8_e4m3fn (ml_dtypes' where numpy has none), like v.
    k: Shaped[np.ndarray, "L T K H"]
    # None for pages that keep K alone, such as latent pages, whose value is a part of k.
    v: Shaped[np.ndarray, "L T K V"] | None = None
    k_scale: Float32[np.ndarray, "L T K"] | None = None  # present for 8-bit numbers only
    v_scale: Float32[np.ndarray, "L T K"] | None = None  # likewise, and None where v is

    def __post_init__(self) -> None:
        alike = self.v is None or (
            self.v.ndim == 4
            and (self.v.shape[:-1], self.v.dtype) == (self.k.shape[:-1], self.k.dtype)
        )
        # Numbers of fewer than 16 bits carry scales.
        scaled = (self.k.dtype.itemsize < 2) == (self.k_scale is not None)
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
                f"a KV segment from token {self.start} on must hold keys and values of one page "
                f"group; these are: {arrays}"
            )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that are not None, by field and in the fields' order."""
        fields = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: array for name, array in fields.items() if array is not None}

    @property
    def stop(self) -> int:
        """Return the position behind the last token."""
        return self.start + self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())
