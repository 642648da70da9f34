"""Weights whose blocks have scales, and two formats of FP8.

DeepSeek-V3 has a scale for each block of 128 x 128, Mistral one for each matrix.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.quantized.fields import Fields

log = logging.getLogger(__name__)

ACTIVATION_SCALE: Final = ".activation_scale"
BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOAT8: Final = frozenset(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
# Numbers that are dequantized at a time, so that intermediate results stay in the cache.
STRIP = 1 << 19


class Matrix(Protocol):
    """An array [R, C] or [E, R, C], or an object that returns parts of one for slices."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """A weight (values - zeros) * scales, where every block of rows and columns has one scale.

    Indexing with two slices of step 1 gives float32, the product rounded once.
    """

    values: Matrix  # [R, C]
    scales: np.ndarray  # [ceil(R / rows), ceil(C / columns)]
    # Rows and columns of a block; either may be an array with the index of the scale for each row
    # or column.
    block: tuple[int | np.ndarray, int | np.ndarray]
    zeros: Matrix | int = 0  # of the shape of scales, or one number for all
    dtype: np.dtype = BFLOAT16  # dtype to keep the weight in, which holds its precision

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows = range(self.shape[0])[index[0]]
        columns = range(self.shape[1])[index[1]]
        found = np.empty((len(rows), len(columns)), np.float32)
        if not found.size:
            return found
        step = max(1, STRIP // len(columns))
        for start in range(0, len(rows), step):
            self._dequantize(rows[start : start + step], columns, found[start : start + step])
        return found

    def _dequantize(self, rows: range, columns: range, found: np.ndarray) -> None:
        shares = [
            np.asarray(part) // size if isinstance(size, int) else size[part.start : part.stop]
            for part, size in zip((rows, columns), self.block, strict=True)
        ]
        found[...] = self.values[rows.start : rows.stop, columns.start : columns.stop]
        found -= self.zeros if isinstance(self.zeros, int) else _spread(self.zeros, *shares)
        # The reader checks that values are finite.
        with np.errstate(invalid="ignore", over="ignore"):
            found *= _spread(self.scales, *shares)


def _spread(matrix: Matrix, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return float32 matrix[rows][:, columns], reading only the range that they span.

    Where all rows or all columns share one index the dimension has size 1, to be broadcast.
    """
    part = matrix[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].astype(np.float32)
    for axis, share in enumerate((rows, columns)):
        at = share - share.min()
        if part.shape[axis] > 1 and not np.array_equal(at, np.arange(part.shape[axis])):
            part = part.take(at, axis)
    return part


@dataclass(frozen=True, eq=False)
class Transposed:
    """The transpose [C, R] of a weight [R, C]."""

    stored: BlockScaled

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1]

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        return self.stored[columns, rows].T


@dataclass(frozen=True, eq=False)
class StackedBlockScaled:
    """Weights [E, R, C] of experts in one tensor, each with scales of its blocks.

    Indexing with three slices of step 1 gives float32, as BlockScaled does.
    """

    values: Matrix  # [E, R, C]
    scales: np.ndarray  # [E, ceil(R / rows), ceil(C / columns)]
    block: tuple[int, int]  # rows and columns of a block
    dtype: np.dtype = BFLOAT16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, rows, columns = index
        values = self.values[experts]
        scales = self.scales[experts]
        _, *sizes = values.shape
        shares = [len(range(size)[part]) for size, part in zip(sizes, index[1:], strict=True)]
        found = np.empty((len(values), *shares), np.float32)
        for at in range(len(values)):
            found[at] = BlockScaled(values[at], scales[at], self.block)[rows, columns]
        return found


def check_scales(name: str, values: Matrix, scales: np.ndarray, block: tuple[int, int]) -> None:
    """Raise CheckpointError unless a matrix, or each of a stack, has one scale for each block."""
    if scales.dtype.kind in "biu":
        raise CheckpointError(
            f"tensor {name} has {scales.dtype} scales; they must be floating point"
        )
    if len(values.shape) not in (2, 3):
        raise CheckpointError(
            f"tensor {name} of shape {list(values.shape)} is quantized in blocks; it must be a "
            "matrix, or matrices of experts"
        )
    *stacked, rows, columns = values.shape
    wanted = (*stacked, -(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != wanted:
        raise CheckpointError(
            f"tensor {name} of shape {list(values.shape)} has scales of shape "
            f"{list(scales.shape)}; blocks of {block[0]} x {block[1]} make them {list(wanted)}"
        )


def group_size_of(name: str, inputs: int, size: int) -> int:
    """Return how many inputs share a scale; size -1 stands for all.

    CheckpointError when groups do not divide the inputs.
    """
    size = inputs if size == -1 else size
    if inputs < 1 or inputs % size:
        raise CheckpointError(
            f"tensor {name} has {inputs} inputs, which do not divide into groups of {size}"
        )
    return size


def check_zeros(name: str, zeros: Matrix, scales: np.ndarray) -> None:
    """Raise CheckpointError unless there is one zero point for each scale."""
    if zeros.shape != scales.shape:
        raise CheckpointError(
            f"tensor {name} holds zero points of shape {list(zeros.shape)}; with scales of shape "
            f"{list(scales.shape)} there must be one for each"
        )


def block_entry(
    name: str, groups: np.ndarray, weight: str, inputs: int, size: int
) -> int | np.ndarray:
    """Return the entry of BlockScaled.block for inputs whose groups are listed.

    GPTQ with act-order quantizes inputs by falling importance, so that the inputs of a group need
    not lie together; it then stores the group of each input. The entry is the group size where the
    groups lie in order all the same, else the listed groups.
    """
    if groups.shape != (inputs,) or groups.dtype.kind not in "iu":
        raise CheckpointError(
            f"tensor {name} is {groups.dtype} {list(groups.shape)}; it must be the group of each "
            f"of the {inputs} inputs of {weight}"
        )
    low = groups.min()
    high = groups.max()
    count = inputs // size
    if low < 0 or high >= count:
        raise CheckpointError(
            f"tensor {name} has groups from {low} to {high}; there are {count}, from 0 on"
        )
    return size if np.array_equal(groups, np.arange(inputs) // size) else groups


def block_size(fields: Fields, name: str) -> tuple[int, int]:
    """Read a field that holds the rows and columns of a block."""
    block = fields.take(name)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise CheckpointError(f"config.json: {name} is {block}; it must be two positive integers")
    return block[0], block[1]


@dataclass(frozen=True)
class Fp8:
    """Storage of FP8 weights with scales."""

    block: tuple[int, int] | None  # rows and columns that share a scale; None: the whole matrix
    static: bool  # modules have the scale of their activations as well

    def scales_of(self, weight: Matrix, scales: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the scales of blocks, and the rows and columns that share one."""
        if self.block:
            return scales, self.block
        *stacked, rows, columns = weight.shape if len(weight.shape) in (2, 3) else (1, 1)
        whole = (*stacked, 1, 1)
        if scales.size == math.prod(stacked):
            scales = scales.reshape(whole)
        return scales, (max(rows, 1), max(columns, 1))


def read(fields: Fields) -> Fp8:
    """Read the quantization_config of DeepSeek and of Mistral."""
    fields.among("fmt", ("e4m3", "float8_e4m3fn", "e5m2"), "e4m3")
    fields.among("scale_fmt", ("float", "ue8m0"), "float")
    scheme = fields.among("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.among("expert_dtype", ("fp8",), "fp8")
    fields.ignore("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")
    block = None
    if not fields.is_null("weight_block_size"):
        block = block_size(fields, "weight_block_size")
    return Fp8(block, scheme == "static")


def dequantized(tensors: Mapping[str, np.ndarray], stored: Fp8) -> dict[str, Any]:
    """Replace each tensor X that has X_scale_inv by a BlockScaled; nothing is dequantized yet.

    Scales of activations are left out: activations stay in full precision here.
    """
    found: dict[str, Any] = dict(tensors)
    if stored.static:
        unused = [name for name in tensors if name.endswith(ACTIVATION_SCALE)]
        for name in unused:
            del found[name]
        note_activations(unused)
    for name in list(found):
        if name.endswith("_scale_inv"):
            weight = name.removesuffix("_scale_inv")
            if weight not in found:
                raise CheckpointError(f"tensor {name} holds scales of {weight}, which is missing")
            values = found[weight]
            scales = found.pop(name)
            if values.dtype not in FLOAT8 or scales.dtype.kind in "biu":
                raise CheckpointError(
                    f"tensor {weight}: {values.dtype} with {scales.dtype} scales is not FP8 "
                    f"(float8 with floating point scales)"
                )
            scales, block = stored.scales_of(values, scales)
            check_scales(weight, values, scales, block)
            kind = BlockScaled if len(values.shape) == 2 else StackedBlockScaled
            found[weight] = kind(values, scales, block)
        elif tensors[name].dtype in FLOAT8 and f"{name}_scale_inv" not in tensors:
            raise CheckpointError(
                f"tensor {name} is quantized, and its scales, {name}_scale_inv, are missing"
            )
    return found


def note_activations(left_out: Sequence[str]) -> None:
    """Say which scales of activations a checkpoint has, if any."""
    if left_out:
        log.warning(
            "left out %d scales of activations, which stay in full precision: %s, ...",
            len(left_out),
            left_out[0],
        )
