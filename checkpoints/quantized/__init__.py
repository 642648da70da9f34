"""Checkpoints with quantized weights: tensors that dequantize the parts of themselves that are
asked for.

A module for each form: FP8 in blocks (DeepSeek-V3), MXFP4 (gpt-oss), AWQ, GPTQ and
compressed-tensors. Each has `read`, which understands quantization_config to its last field, and
`dequantized`, which joins weights and scales.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from checkpoints.quantized import awq, blocks, compressed, gptq, mxfp4
from checkpoints.quantized.fields import Fields

METHODS: Final = MappingProxyType(
    {"fp8": blocks, "mxfp4": mxfp4, "awq": awq, "gptq": gptq, "compressed-tensors": compressed}
)


def dequantized(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's tensors, those that are quantized as one with their scales, under the
    weights' own names.

    config: config.json. CheckpointError for a way of quantizing that is not known here, a scale
    without its weight, a weight without its scales, or shapes that do not fit each other.
    """
    method, form = _read(config)
    return METHODS[method].dequantized(tensors, form) if method else dict(tensors)


def check_method(config: Mapping[str, Any]) -> str | None:
    """One of METHODS or None; CheckpointError for others, and for a field or value that is not
    understood.
    """
    return _read(config)[0]


def _read(config: Mapping[str, Any]) -> tuple[str | None, Any]:
    """quant_method, and what its module reads in the fields."""
    if not config.get("quantization_config"):
        return None, None
    fields = Fields("quantization_config", config["quantization_config"])
    method = fields.among("quant_method", tuple(METHODS))
    form = METHODS[method].read(fields)
    fields.finish()
    return method, form
