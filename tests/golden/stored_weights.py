"""Forms of model.safetensors that publishers write and transformers reads, but does not save."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch  # pyright: ignore[reportMissingImports]
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight  # pyright: ignore[reportMissingImports]

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """`encode` makes the published tensors of float32 ones, `decode` the float32 ones that they
    stand for.

    `loads`: whether transformers loads the published form on a CPU.
    """

    encode: Callable[[Tensors], Tensors]
    decode: Callable[[Tensors], Tensors]
    loads: bool = True


def mtp_layer(layer: int) -> Stored:
    """A layer after the last one, for predicting the token after next: DeepSeek-V3 has it in its
    checkpoint.
    """

    def encode(tensors: Tensors) -> Tensors:
        last, new = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
        hidden = tensors["model.norm.weight"].shape[0]
        block = {
            name.replace(last, new): x.flip(0)
            for name, x in tensors.items()
            if name.startswith(last)
        }
        norms = {
            f"{new}{name}.weight": torch.ones(hidden)
            for name in ("enorm", "hnorm", "shared_head.norm")
        }
        ends = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        copies = {
            f"{new}{name}.weight": tensors[f"{source}.weight"].clone()
            for name, source in ends.items()
        }
        return {
            **tensors,
            **block,
            **norms,
            **copies,
            f"{new}eh_proj.weight": torch.eye(hidden, 2 * hidden),
        }

    def decode(tensors: Tensors) -> Tensors:
        return {
            name: x for name, x in tensors.items() if not name.startswith(f"model.layers.{layer}.")
        }

    return Stored(encode, decode)


def bfloat16(tensors: Tensors) -> Tensors:
    """Quantized checkpoints have the rest of their weights in bfloat16, but for the bias of
    DeepSeek-V3's choices.
    """
    return {
        name: x if name.endswith("e_score_correction_bias") else x.bfloat16()
        for name, x in tensors.items()
    }


LARGEST_E4M3 = 448.0


def scales_of_elements(
    scales: torch.Tensor, block: tuple[int, int], shape: torch.Size
) -> torch.Tensor:
    """[rows, columns] of scales [blocks, blocks]; the last blocks may be partial."""
    rows, columns = block
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def fp8_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8_e4m3fn, and the float32 scale to multiply each of its blocks with
    again."""
    rows, columns = block
    pad = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    blocks = (
        torch.nn.functional.pad(weight, pad).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    )
    scales = blocks.abs().amax((1, 3)) / LARGEST_E4M3
    return (weight / scales_of_elements(scales, block, weight.shape)).to(
        torch.float8_e4m3fn
    ), scales


def encode_fp8(block: tuple[int, int], tensors: Tensors) -> Tensors:
    linear = {
        name: x for name, x in tensors.items() if name.endswith("_proj.weight") or "_mqa" in name
    }
    stored = bfloat16({name: x for name, x in tensors.items() if name not in linear})
    for name, weight in linear.items():
        stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(weight, block)
    return stored


def encode_fp8_per_tensor(tensors: Tensors) -> Tensors:
    """One bfloat16 scale for each matrix, and one for its activations, as Ministral 3 has them."""
    linear = {name: x for name, x in tensors.items() if name.endswith("_proj.weight")}
    stored = bfloat16({name: x for name, x in tensors.items() if name not in linear})
    for name, weight in linear.items():
        scale = (weight.abs().amax() / LARGEST_E4M3).bfloat16()
        stored[f"{name}_scale_inv"] = scale
        stored[name] = (
            (weight / scale.float()).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
        )
        stored[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.1).bfloat16()
    return stored


def decode_fp8_per_tensor(tensors: Tensors) -> Tensors:
    """Return the weights; an error if transformers' own dequantization says otherwise."""
    weights = {name: x.float() for name, x in tensors.items() if "_scale" not in name}
    for name, weight in weights.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            weights[name] = weight * scale.float()
            if not torch.equal(
                weights[name], _dequantize_fp8_weight(weight, scale.float(), None, torch.float32)
            ):
                raise SystemExit(f"{name}: transformers dequantizes it to something else")
    return weights


FP8_PER_TENSOR = Stored(encode_fp8_per_tensor, decode_fp8_per_tensor, loads=False)


def decode_fp8(block: tuple[int, int], tensors: Tensors) -> Tensors:
    """An error if transformers' own dequantization says otherwise."""
    weights = {name: x.float() for name, x in tensors.items() if not name.endswith("_scale_inv")}
    for name, weight in weights.items():
        scales = tensors.get(f"{name}_scale_inv")
        if scales is not None:
            weights[name] = weight * scales_of_elements(scales, block, weight.shape)
            if not torch.equal(
                weights[name], _dequantize_fp8_weight(weight, scales, list(block), torch.float32)
            ):
                raise SystemExit(f"{name}: transformers dequantizes its blocks to something else")
    return weights


def fp8(block: tuple[int, int]) -> Stored:
    """DeepSeek-V3's own form (arXiv 2412.19437, section 3.3): linear layers in fp8, a scale for
    each block.

    When transformers 5.23 loads it without a GPU, it takes all blocks of a matrix for equally
    large: it cannot.
    """
    return Stored(partial(encode_fp8, block), partial(decode_fp8, block), loads=False)


E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
)  # of the codes 0 to 7; code 8 + c is -E2M1[c]
LARGEST_EXPONENT = 2  # of E2M1: 6 is 1.5 * 2**2
MX_BLOCK = 32
MX_BIAS = 127  # of the shared exponents


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest codes, of two as near the one whose mantissa bit is 0; beyond the largest value,
    the largest.
    """
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    upper_is_even = torch.arange(1, 8) % 2 == 0
    above = (values.abs()[..., None] > middles) | (
        (values.abs()[..., None] == middles) & upper_is_even
    )
    return above.sum(-1) + 8 * values.signbit()


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [..., groups, 16] and [..., groups] of weights [..., 32 * groups]; the low half of a
    byte comes first.
    """
    groups = weight.unflatten(-1, (-1, MX_BLOCK))
    exponents = groups.abs().amax(-1).log2().floor().int() - LARGEST_EXPONENT
    codes = e2m1_codes(torch.ldexp(groups, -exponents[..., None]))
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + MX_BIAS).to(
        torch.uint8
    )


def encode_mxfp4(tensors: Tensors) -> Tensors:
    experts = {
        name: x for name, x in tensors.items() if name.endswith(("gate_up_proj", "down_proj"))
    }
    stored = bfloat16({name: x for name, x in tensors.items() if name not in experts})
    for name, weight in experts.items():
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = mxfp4_blocks(weight.transpose(1, 2))
    return stored


def decode_mxfp4(tensors: Tensors) -> Tensors:
    """Experts' weights [E, in, out] of blocks [E, out, groups, 16]."""
    weights = {
        name: x.float() for name, x in tensors.items() if not name.endswith(("_blocks", "_scales"))
    }
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
            values = E2M1[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
            scaled = torch.ldexp(values, tensors[f"{stem}_scales"].int()[..., None] - MX_BIAS)
            weights[stem] = scaled.flatten(-2).transpose(1, 2).contiguous()
    return weights


MXFP4 = Stored(encode_mxfp4, decode_mxfp4)
"""gpt-oss's own form: experts in MXFP4 (OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3), 32
    inputs to a block."""
