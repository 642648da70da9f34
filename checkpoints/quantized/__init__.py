"""Checkpoints with quantized weights: tensors that are dequantized slice by slice when read.

Each format has a module: FP8 in blocks (DeepSeek-V3), MXFP4 (gpt-oss), AWQ, GPTQ and
compressed-tensors. `read` understands every field of quantization_config or refuses it;
`dequantized` joins weights and scales.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.quantized import awq, blocks, compressed, gptq, mxfp4
from jaxserve.checkpoints.quantized.fields import Fields

METHODS: Final = MappingProxyType(
    {"fp8": blocks, "mxfp4": mxfp4, "awq": awq, "gptq": gptq, "compressed-tensors": compressed}
)


def dequantized(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's tensors by name, quantized weights joined with their scales.

    Args:
        config: Contents of config.json.

    Raises:
        CheckpointError: The format is unknown, a scale lacks its weight, a weight lacks its scales,
            or shapes do not fit each other.
    """
    method, layout = _read(config)
    return METHODS[method].dequantized(tensors, layout) if method else dict(tensors)


def parts_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return config.json and, where it has one, the text_config inside, which may be quantized."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def check_method(config: Mapping[str, Any]) -> str | None:
    """Return the format's key in METHODS, or None for weights that are not quantized.

    CheckpointError for unknown formats, and for a field or value that is not understood.
    """
    return _read(config)[0]


def _read(config: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Return quant_method, and what its module reads from the other fields."""
    found = [part.get("quantization_config") for part in parts_of(config)]
    given = [each for each in found if each]
    if not given:
        return None, None
    if any(each != given[0] for each in given):
        raise CheckpointError(
            "config.json: quantization_config and that of text_config differ; use another "
            "checkpoint"
        )
    fields = Fields("quantization_config", given[0])
    method = fields.among("quant_method", tuple(METHODS))
    layout = METHODS[method].read(fields)
    fields.finish()
    return method, layout
