"""Write tiny Llamas quantized by AutoAWQ, AutoGPTQ, GPTQModel and compressed-tensors, and what
these make of them.

Needs the environment of make_goldens.py and beside it, since the libraries want CUDA or old
versions of others:

    pip install --no-deps --target SITE compressed-tensors==0.20.0 loguru pypcre logbar device-smi tokenicer defuser \
        threadpoolctl torchao dill pillow
    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1 gptqmodel==7.7.0     # unpacked side by side in SOURCES

Then `PYTHONPATH=SITE python tests/golden/make_quantized.py SOURCES` rewrites quantized/<case>/
beside this file: config.json and model.safetensors as published, and golden.npz: of every quantized
weight [O, I], under its name, what the library dequantizes it to in the checkpoint's own precision,
the bits as uint16; `prompts` int32 [B, P], and `logits` float32 [B, P, V] of transformers' model
with the weights that the library gives for float32 scales.
"""

import argparse
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

Tensors = dict[str, torch.Tensor]
GROUP = 32
SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
)


class Quantized(NamedTuple):
    """A linear layer: its tensors by the last part of their names, and what they stand for in both
    precisions.
    """

    tensors: Tensors
    own: torch.Tensor  # [O, I] in the checkpoint's precision
    float32: torch.Tensor


class Case(NamedTuple):
    name: str
    quantize: Callable[[str, torch.Tensor], Quantized]  # of a module's name and its weight [O, I]
    config: dict[str, Any]
    dtype: torch.dtype


def package(name: str, folder: Path, **attributes: Any) -> None:
    """A package that imports nothing when it is imported: what those of these libraries import is
    not here.
    """
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    vars(module).update(attributes)
    sys.modules[name] = module


def affine(
    weight: torch.Tensor, bits: int, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float16-exact scales and zero points from 1 on, float32 [O, groups], of each output and group
    of inputs.
    """
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).half().float()
        scales.append(scale)
        zeros.append((-low / scale).round().clamp(1, 2**bits - 1))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.half()
    return layer


def awq(name: str, weight: torch.Tensor) -> Quantized:
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    vars(gemm)["get_best_device"] = lambda: "cpu"
    scales, zeros = affine(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    layer = gemm.WQLinear_GEMM.from_linear(
        linear(weight), 4, GROUP, False, scales.T.contiguous(), zeros.T.contiguous()
    )
    own, float32 = (
        packing.dequantize_gemm(layer.qweight, layer.qzeros, scale, 4, GROUP).T
        for scale in (layer.scales, layer.scales.float())
    )
    return Quantized(
        {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}, own, float32
    )


def groups_of(weight: torch.Tensor, size: int, ordered: bool) -> torch.Tensor:
    inputs = weight.shape[1]
    groups = (torch.arange(inputs) // (inputs if size == -1 else size)).int()
    return (
        groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        if ordered
        else groups
    )


def auto_gptq(bits: int, size: int, ordered: bool) -> Callable[[str, torch.Tensor], Quantized]:
    def quantize(name: str, weight: torch.Tensor) -> Quantized:
        module = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
        groups = groups_of(weight, size, ordered)
        scales, zeros = affine(weight, bits, groups)
        layer = module.QuantLinear(bits, size, weight.shape[1], weight.shape[0], bias=False)
        layer.pack(linear(weight), scales, zeros, groups)
        own = layer(torch.eye(weight.shape[1], dtype=torch.float16)).T
        tensors = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
        layer.scales = layer.scales.float()
        return Quantized(tensors, own, layer(torch.eye(weight.shape[1])).T)

    return quantize


def gptqmodel(bits: int, ordered: bool) -> Callable[[str, torch.Tensor], Quantized]:
    def quantize(name: str, weight: torch.Tensor) -> Quantized:
        module = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
        groups = groups_of(weight, GROUP, ordered)
        scales, zeros = affine(weight, bits, groups)
        sizes = dict(in_features=weight.shape[1], out_features=weight.shape[0])
        layer = module.TorchLinear(
            bits=bits, group_size=GROUP, sym=False, desc_act=ordered, **sizes
        )
        layer.pack(linear(weight), scales, zeros.int(), groups)
        layer.post_init()
        tensors = {
            part: getattr(layer, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        own = layer.eval().dequantize_weight().T.clone()
        layer.scales = layer.scales.float()
        return Quantized(tensors, own, layer.dequantize_weight().T.clone())

    return quantize


def weight_ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest of all that share a scale, in the shape of the scales."""
    (rows, columns), block = weight.shape, args.block_structure
    size = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "block": block,
    }
    height, width = size[args.strategy]
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def compressed(schemes: dict[str, Any]) -> Callable[[str, torch.Tensor], Quantized]:
    """schemes: QuantizationScheme by the part of a module's name that they are for, "" for all the
    rest.
    """

    def quantize(name: str, weight: torch.Tensor) -> Quantized:
        compressors = importlib.import_module("compressed_tensors.compressors").BaseCompressor
        helpers = importlib.import_module("compressed_tensors.quantization.utils.helpers")
        scheme = next(scheme for part, scheme in schemes.items() if part in name)
        low, high = weight_ranges(weight.bfloat16(), scheme.weights)
        scales, zeros = helpers.calculate_qparams(low, high, scheme.weights)
        if scheme.weights.strategy == "tensor":
            scales, zeros = scales.reshape(1), zeros.reshape(1)
        plain = dict(
            weight=weight.bfloat16(), weight_scale=scales.bfloat16(), weight_zero_point=zeros
        )
        compressor = compressors.get_value_from_registry(scheme.format)
        tensors = compressor.compress(plain, scheme)
        own, float32 = (
            compressor.decompress(
                {**tensors, "weight_scale": tensors["weight_scale"].to(dtype)}, scheme
            )["weight"]
            for dtype in (torch.bfloat16, torch.float32)
        )
        if scheme.input_activations and not scheme.input_activations.dynamic:
            tensors |= {"input_scale": torch.tensor([0.02], dtype=torch.bfloat16)}
        return Quantized(tensors, own, float32)

    return quantize


def compressed_cases() -> Iterator[Case]:
    quantization = importlib.import_module("compressed_tensors.quantization")
    arguments, scheme_of = quantization.QuantizationArgs, quantization.QuantizationScheme
    token = arguments(num_bits=8, strategy="token", dynamic=True)
    per_token = arguments(num_bits=8, type="float", strategy="token", dynamic=True)
    static = arguments(num_bits=8, type="float", strategy="tensor")
    fp8 = dict(num_bits=8, type="float")
    int4 = dict(num_bits=4, strategy="group", group_size=GROUP)
    forms = {
        "w4a16": ("pack-quantized", dict(weights=arguments(**int4, actorder="weight"))),
        "w4a16_asymmetric": ("pack-quantized", dict(weights=arguments(**int4, symmetric=False))),
        "w8a16": ("pack-quantized", dict(weights=arguments(num_bits=8, strategy="channel"))),
        "w8a8": (
            "int-quantized",
            dict(weights=arguments(num_bits=8, strategy="channel"), input_activations=token),
        ),
        "w8a8_asymmetric": (
            "int-quantized",
            dict(
                weights=arguments(num_bits=8, strategy="group", group_size=GROUP, symmetric=False)
            ),
        ),
        "fp8_tensor": (
            "float-quantized",
            dict(weights=arguments(**fp8, strategy="tensor"), input_activations=static),
        ),
        "fp8_channel": (
            "float-quantized",
            dict(weights=arguments(**fp8, strategy="channel"), input_activations=per_token),
        ),
        "fp8_block": (
            "float-quantized",
            dict(
                weights=arguments(**fp8, strategy="block", block_structure=[24, 40]),
                input_activations=per_token,
            ),
        ),
    }
    for name, (form, parts) in forms.items():
        scheme = scheme_of(targets=["Linear"], format=form, **parts)
        yield compressed_case(f"compressed_{name}", {"": scheme}, form)
    mixed = {
        "down_proj": scheme_of(
            targets=["re:.*down_proj$"], format="int-quantized", **forms["w8a8"][1]
        ),
        "": scheme_of(targets=["Linear"], format="pack-quantized", **forms["w4a16"][1]),
    }
    yield compressed_case("compressed_mixed", mixed, "mixed-precision")


def compressed_case(name: str, schemes: dict[str, Any], form: str) -> Case:
    quantization = importlib.import_module("compressed_tensors.quantization")
    config = quantization.QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(reversed(schemes.values()))},
        format=form,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return Case(name, compressed(schemes), config.model_dump(mode="json"), torch.bfloat16)


def cases() -> Iterator[Case]:
    shared = dict(bits=4, group_size=GROUP)
    config = dict(
        quant_method="awq", version="gemm", zero_point=True, modules_to_not_convert=None, **shared
    )
    yield Case("awq", awq, config, torch.float16)
    for bits, size, ordered in (
        (2, GROUP, False),
        (3, GROUP, True),
        (4, GROUP, True),
        (8, -1, False),
    ):
        config = dict(quant_method="gptq", bits=bits, group_size=size, desc_act=ordered, sym=False)
        config |= dict(
            damp_percent=0.1, true_sequential=True, static_groups=False, model_name_or_path=None
        )
        yield Case(f"gptq_{bits}bit", auto_gptq(bits, size, ordered), config, torch.float16)
    config = dict(
        quant_method="gptq",
        method="gptq",
        format="gptq_v2",
        checkpoint_format="gptq_v2",
        lm_head=False,
    )
    config |= dict(
        desc_act=True,
        sym=False,
        pack_dtype="int32",
        meta=dict(quantizer=["gptqmodel:7.7.0"]),
        **shared,
    )
    yield Case("gptq_v2", gptqmodel(4, True), config, torch.float16)
    yield from compressed_cases()


@torch.no_grad()
def make_case(case: Case, folder: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    model = (
        LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1, max_position_embeddings=64))
        .float()
        .eval()
    )
    golden, stored = {}, {}
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5, generator=generator)
        else:
            weight.normal_(0.0, 1.5 * weight.shape[1] ** -0.5, generator=generator)
        weight.copy_(weight.to(case.dtype))
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            tensors, own, float32 = case.quantize(module, weight.clone())
            stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
            golden[name] = own.contiguous().to(case.dtype).view(torch.uint16).numpy()
            weight.copy_(float32)
        else:
            stored[name] = weight.to(case.dtype)
    prompts = torch.randint(SIZES["vocab_size"], (2, 16), generator=generator)
    golden |= dict(prompts=prompts.int().numpy(), logits=model(prompts).logits.numpy())
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_diff_dict(), **SIZES, "architectures": ["LlamaForCausalLM"]}
    config |= dict(
        torch_dtype=str(case.dtype).removeprefix("torch."), quantization_config=case.config
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(folder / "golden.npz", **golden)
    sizes = [f"{path.name} {path.stat().st_size:,}" for path in sorted(folder.iterdir())]
    print(f"{case.name:30} {', '.join(sizes)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write tiny models quantized by other people's libraries."
    )
    parser.add_argument(
        "sources", type=Path, help="where awq/, auto_gptq/ and gptqmodel/ are, in any folders of it"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "quantized")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("awq", "auto_gptq", "gptqmodel"):
        [folder] = args.sources.glob(f"*/{name}/__init__.py")
        package(name, folder.parent, DEBUG_ON=False, DEVICE_THREAD_POOL=None)
    package("gptqmodel.models", Path(sys.modules["gptqmodel"].__path__[0], "models"))
    for case in cases():
        make_case(case, args.out / case.name)


if __name__ == "__main__":
    main()
