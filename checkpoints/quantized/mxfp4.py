"""MXFP4 (OCP Microscaling Formats 1.0), the format of gpt-oss.

Blocks of 32 numbers of four bits share a power of two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.quantized.blocks import BFLOAT16
from jaxserve.checkpoints.quantized.fields import Fields

BLOCK = 32  # numbers that share a power of two
# The values of e2m1, by their bits: sign, two of exponent, one of mantissa.
E2M1: Final = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """The experts' weights [E, C, R] of a quantized checkpoint.

    The shape is that of checkpoints whose experts are not quantized. Indexing with three slices
    gives bfloat16, which holds every value exactly.
    """

    blocks: np.ndarray  # uint8 [E, R, C / 32, 16], two numbers each, the lower bits first
    scales: np.ndarray  # uint8 [E, R, C / 32]
    dtype: np.dtype = BFLOAT16

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, blocks, half = self.blocks.shape
        return experts, blocks * half * 2, rows

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, columns, rows = (
            range(size)[part] for size, part in zip(self.shape, index, strict=True)
        )
        found = np.empty((len(experts), len(columns), len(rows)), self.dtype)
        # One expert at a time, since intermediate float32 takes twice the memory of the result.
        for at, expert in enumerate(experts):
            found[at] = self._expert(expert, columns, slice(rows.start, rows.stop))
        return found

    def _expert(self, expert: int, columns: range, rows: slice) -> np.ndarray:
        first = columns.start // BLOCK
        end = -(-columns.stop // BLOCK)
        packed = self.blocks[expert, rows, first:end]
        numbers = E2M1[np.stack([packed & 15, packed >> 4], axis=-1)]  # [R, blocks, 16, 2]
        exponents = self.scales[expert, rows, first:end].astype(np.int32) - 127
        with np.errstate(over="ignore"):  # the reader checks that values are finite
            numbers = np.ldexp(numbers.reshape(*exponents.shape, BLOCK), exponents[..., None])
        begin = columns.start - first * BLOCK
        return numbers.reshape(len(numbers), -1)[:, begin : begin + len(columns)].T


def read(fields: Fields) -> None:
    """Accept the fields of quantization_config; none changes the weights."""
    fields.ignore("modules_to_not_convert", "dequantize")


def dequantized(tensors: Mapping[str, np.ndarray], layout: None) -> dict[str, Any]:
    """Join X_blocks and X_scales to X."""
    found: dict[str, Any] = dict(tensors)
    for name in tensors:
        if name.endswith("_scales"):
            weight = name.removesuffix("_scales")
            if f"{weight}_blocks" not in tensors:
                raise CheckpointError(
                    f"tensor {name} holds scales of {weight}_blocks, which is missing"
                )
            found[weight] = _joined(weight, found.pop(f"{weight}_blocks"), found.pop(name))
        elif name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" not in tensors:
            scales = name.removesuffix("_blocks") + "_scales"
            raise CheckpointError(
                f"tensor {name} is quantized, and its scales, {scales}, are missing"
            )
    return found


def _joined(name: str, values: np.ndarray, scales: np.ndarray) -> Mxfp4:
    experts, rows, count, half = values.shape if values.ndim == 4 else (0,) * 4
    if (
        half * 2 != BLOCK
        or scales.shape != (experts, rows, count)
        or any(x.dtype != np.uint8 for x in (values, scales))
    ):
        raise CheckpointError(
            f"tensor {name}: {values.dtype} blocks {list(values.shape)} with {scales.dtype} scales "
            f"{list(scales.shape)} are not MXFP4 ([E, R, n, 16] and [E, R, n], uint8)"
        )
    return Mxfp4(values, scales)
