"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it.

Weights have two, three, four or eight bits, with zero points and scales for groups of inputs.
X.qweight int32 [I * bits / 32, O], X.qzeros int32 [I / group, O * bits / 32], X.scales [I / group,
O] and, if inputs were quantized in the order of their activations, X.g_idx int32 [I], each input's
group, are the weight X.weight [O, I]: (qweight - qzeros)[g_idx] * scales[g_idx], transposed. The
first version of the format stores zero points minus one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxserve.checkpoints.quantized.blocks import (
    BlockScaled,
    Transposed,
    block_entry,
    check_scales,
    check_zeros,
    group_size_of,
)
from jaxserve.checkpoints.quantized.fields import Fields
from jaxserve.checkpoints.quantized.modules import Parts, by_module, check_complete
from jaxserve.checkpoints.quantized.packed import WORD, packed

PARTS = ("qweight", "qzeros", "scales")
ORDER = "g_idx"
BITS = (2, 3, 4, 8)
# Versions of the format.
FIRST = "gptq"
SECOND = "gptq_v2"
# Fields that say how weights were found, which are quantized (their tensors show it), and how
# another library should run them.
IGNORED: Final = """
    sym static_groups true_sequential damp_percent damp_auto_increment mse act_group_aware
    hyb_act gptaq gptaq_alpha v2 v2_alpha mock_quantization parallel_packing meta
    model_name_or_path model_file_base_name dataset tokenizer model_seqlen batch_size
    pad_token_id max_input_length cache_block_outputs cache_examples_on_gpu lm_head
    block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_not_convert use_cuda_fp16 use_exllama disable_exllama exllama_config backend
    autoround_version provider iters nsamples seqlen lr minmax_lr enable_minmax_tuning
    enable_quanted_input low_gpu_mem_usage gradient_accumulate_steps
""".split()  # AutoRound writes this format too


@dataclass(frozen=True)
class Layout:
    """Storage of weights."""

    bits: int  # of a number
    group: int  # inputs that share a scale; -1: all
    # Inputs were quantized in the order of their activations, so that g_idx is needed.
    ordered: bool
    offset: int  # to add to zero points


def read(fields: Fields) -> Layout:
    """Read the layout; CheckpointError for fields and values that are not implemented."""
    version = fields.among("checkpoint_format", (FIRST, SECOND), fields.take("format", FIRST))
    fields.among("format", (version,), version)
    fields.among("method", ("gptq",), "gptq")
    fields.among("pack_dtype", ("int32",), "int32")
    fields.among("is_marlin_format", (False,), False)
    fields.among("awq_gemm_checkpoint", (False,), False)
    fields.empty("dynamic", "adapter", "rotation", "activation")
    fields.ignore(*IGNORED)
    return Layout(
        bits=fields.among("bits", BITS),
        group=fields.group_size(),
        ordered=fields.among("desc_act", (False, True), False),
        offset=int(version == FIRST),
    )


def dequantized(tensors: Mapping[str, np.ndarray], layout: Layout) -> dict[str, Any]:
    """Join X.qweight, X.qzeros, X.scales and X.g_idx to X.weight."""
    modules, others = by_module(tensors, frozenset((*PARTS, ORDER)))
    weights = {
        f"{module}.weight": _joined(module, parts, layout) for module, parts in modules.items()
    }
    return {**others, **weights}


def _joined(module: str, parts: Parts, layout: Layout) -> Transposed:
    check_complete(module, parts, (*PARTS, ORDER) if layout.ordered else PARTS)
    qweight, qzeros, scales = (parts[part] for part in PARTS)
    outputs = scales.shape[-1] if scales.ndim else 0
    inputs = len(qweight) * WORD // layout.bits if qweight.ndim else 0
    weight = f"{module}.qweight"
    values = packed(weight, qweight, layout.bits, 0, inputs)
    told_by = f"{module}.scales"
    zeros = packed(
        f"{module}.qzeros", qzeros, layout.bits, 1, outputs, told_by, offset=layout.offset
    )
    group = group_size_of(weight, inputs, layout.group)
    check_scales(weight, values, scales, (group, 1))
    check_zeros(f"{module}.qzeros", zeros, scales)
    groups: int | np.ndarray = group
    if ORDER in parts:
        groups = block_entry(f"{module}.{ORDER}", parts[ORDER], weight, inputs, group)
    return Transposed(BlockScaled(values, scales, (groups, 1), zeros))
