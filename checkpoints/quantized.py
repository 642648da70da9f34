"""Checkpoints with quantized weights: tensors that dequantize the parts of themselves that are asked for.

FP8 in blocks is DeepSeek-V3's form (a float32 factor for each block of 128 x 128 numbers); MXFP4 is gpt-oss's (OCP
Microscaling Formats 1.0: 32 numbers of four bits share a power of two).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOAT8: Final = frozenset(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
BLOCK = 32  # numbers that share a power of two
# The values of e2m1, by their bits: sign, two of exponent, one of mantissa.
E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """values [R, C] of eight bits times scales [ceil(R / rows), ceil(C / columns)] of their blocks.

    It is indexed with two slices and gives float32. dtype: what it is to be kept in, since no more is in it.
    """

    values: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]
    dtype: np.dtype = BFLOAT16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        whole = [range(size)[part] for size, part in zip(self.shape, index, strict=True)]
        rows, columns = (np.asarray(part) // size for part, size in zip(whole, self.block, strict=True))
        return self.values[index].astype(np.float32) * self.scales[rows][:, columns].astype(np.float32)


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """blocks uint8 [E, R, C / 32, 16], two numbers in each, the lower bits first; scales uint8 [E, R, C / 32].

    It stands for [E, C, R], as the same checkpoints have these weights where they are not quantized; it is indexed with
    three slices and gives bfloat16, which holds all that is in them.
    """

    blocks: np.ndarray
    scales: np.ndarray
    dtype: np.dtype = BFLOAT16

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, blocks, half = self.blocks.shape
        return experts, blocks * half * 2, rows

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, columns, rows = (range(size)[part] for size, part in zip(self.shape, index, strict=True))
        found = np.empty((len(experts), len(columns), len(rows)), self.dtype)
        for at, expert in enumerate(experts):  # one after the other: float32 takes twice the memory of what is wanted
            found[at] = self._expert(expert, columns, slice(rows.start, rows.stop))
        return found

    def _expert(self, expert: int, columns: range, rows: slice) -> np.ndarray:
        first, end = columns.start // BLOCK, -(-columns.stop // BLOCK)
        packed = self.blocks[expert, rows, first:end]
        numbers = E2M1[np.stack([packed & 15, packed >> 4], axis=-1)]  # [R, blocks, 16, 2]
        exponents = self.scales[expert, rows, first:end].astype(np.int32) - 127
        with np.errstate(over="ignore"):  # infinity, for whoever reads to refuse
            numbers = np.ldexp(numbers.reshape(*exponents.shape, BLOCK), exponents[..., None])
        begin = columns.start - first * BLOCK
        return numbers.reshape(len(numbers), -1)[:, begin : begin + len(columns)].T


def dequantized(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's tensors, those that are quantized as one with their scales, under the weights' own names.

    config: config.json. CheckpointError for a way of quantizing that is not known here, a scale without its weight, or
    a weight without its scales.
    """
    method = check_method(config)
    if method is None:
        return dict(tensors)
    found: dict[str, Any] = dict(tensors)
    suffix, partner = ("_scale_inv", "") if method == "fp8" else ("_scales", "_blocks")
    for name in tensors:
        if name.endswith(suffix):
            weight = name.removesuffix(suffix)
            if weight + partner not in tensors:
                raise CheckpointError(f"tensor {name} holds scales of {weight + partner}, which is missing")
            scales, values = found.pop(name), found.pop(weight + partner)
            found[weight] = _joined(method, weight, values, scales, config)
        elif tensors[name].dtype in FLOAT8 or (partner and name.endswith(partner)):
            scales_name = name.removesuffix(partner) + suffix
            if scales_name not in tensors:
                raise CheckpointError(f"tensor {name} is quantized, and its scales, {scales_name}, are missing")
    return found


def check_method(config: Mapping[str, Any]) -> str | None:
    """fp8, mxfp4 or None; CheckpointError for others."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "mxfp4":
        return method
    if method == "fp8" and isinstance(quantization.get("weight_block_size"), list):
        return method
    raise CheckpointError(
        f"config.json: quantization_config with quant_method {method!r} is not implemented "
        "(implemented: fp8 with weight_block_size, mxfp4; use the unquantized checkpoint)"
    )


def _joined(method: str, name: str, values: np.ndarray, scales: np.ndarray, config: Mapping[str, Any]) -> Any:
    if method == "mxfp4":
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
    if values.dtype not in FLOAT8 or scales.dtype.kind in "biu":
        raise CheckpointError(
            f"tensor {name}: {values.dtype} with {scales.dtype} scales is not FP8 in blocks (float8 and floating point)"
        )
    block = tuple(config["quantization_config"]["weight_block_size"])
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise CheckpointError(f"config.json: weight_block_size is {list(block)}; it must be two positive integers")
    wanted = tuple(-(-size // each) for size, each in zip(values.shape, block, strict=False))
    if values.ndim != 2 or scales.shape != wanted:
        raise CheckpointError(
            f"tensor {name} of shape {list(values.shape)} has scales of shape {list(scales.shape)}; blocks of "
            f"{block[0]} x {block[1]} make them {list(wanted)}"
        )
    return BlockScaled(values, scales, block)
