"""AWQ (Lin et al. 2023) as AutoAWQ stores it for its GEMM kernel.

Weights have four bits, with zero points and scales for groups of inputs.

X.qweight int32 [I, O / 8], X.qzeros int32 [I / group, O / 8], X.scales [I / group, O] are the
weight X.weight [O, I]: (qweight - qzeros) * scales, transposed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.checkpoints.quantized.blocks import (
    BlockScaled,
    Transposed,
    check_scales,
    check_zeros,
    group_size_of,
)
from jaxserve.checkpoints.quantized.fields import Fields
from jaxserve.checkpoints.quantized.modules import Parts, by_module, check_complete
from jaxserve.checkpoints.quantized.packed import packed

PARTS = ("qweight", "qzeros", "scales")
BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of a word's eight numbers lies: even ones first


def read(fields: Fields) -> int:
    """Return the size of the groups; CheckpointError for fields of other formats than GEMM."""
    fields.among("bits", (BITS,), BITS)
    fields.among("zero_point", (True,), True)
    fields.among("version", ("gemm",), "gemm")
    fields.among("format", ("gemm",), "gemm")
    fields.empty("sym", "desc_act", "dynamic")
    fields.ignore("modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    fields.ignore("backend", "exllama_config", "lm_head", "true_sequential", "meta", "pack_dtype")
    return fields.group_size()


def dequantized(tensors: Mapping[str, np.ndarray], group: int) -> dict[str, Any]:
    """Join X.qweight, X.qzeros and X.scales to X.weight."""
    modules, others = by_module(tensors, frozenset(PARTS))
    weights = {
        f"{module}.weight": _joined(module, parts, group) for module, parts in modules.items()
    }
    return {**others, **weights}


def _joined(module: str, parts: Parts, group: int) -> Transposed:
    check_complete(module, parts, PARTS)
    qweight, qzeros, scales = (parts[part] for part in PARTS)
    outputs = scales.shape[-1] if scales.ndim else 0
    told_by = f"{module}.scales"
    values = packed(f"{module}.qweight", qweight, BITS, 1, outputs, told_by, order=PLACES)
    zeros = packed(f"{module}.qzeros", qzeros, BITS, 1, outputs, told_by, order=PLACES)
    block = (group_size_of(f"{module}.qweight", len(qweight), group), 1)
    check_scales(f"{module}.qweight", values, scales, block)
    check_zeros(f"{module}.qzeros", zeros, scales)
    return Transposed(BlockScaled(values, scales, block, zeros))
