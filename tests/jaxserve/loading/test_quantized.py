"""Models quantized by other libraries: the weights, logits and shards that are loaded."""

from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.checkpoints.quantized import dequantized
from jaxserve.errors import ModelError
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.loading.loaded import load_params
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
PROJECTIONS = 7  # of the one layer


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_library_bit_for_bit(case: str) -> None:
    """Weights are compared in the library's precision, to which ours are rounded."""
    checkpoint = HFCheckpoint.open(GOLDEN / case)
    golden = np.load(GOLDEN / case / "golden.npz")
    weights = dequantized(checkpoint.tensors, checkpoint.config)
    names = [name for name in golden.files if name.endswith(".weight")]
    assert len(names) == PROJECTIONS
    for name in names:
        ours = weights[name][:, :].astype(DTYPES[checkpoint.config["torch_dtype"]])
        np.testing.assert_array_equal(ours.view(np.uint16), golden[name], err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantized_model(case: str) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    prompts = golden["prompts"]
    decoder = Decoder(
        GOLDEN / case, one_device_mesh(), rows=len(prompts), context=prompts.shape[1], page_size=8
    )
    np.testing.assert_allclose(decoder(prompts, 0), golden["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_every_mesh_loads_what_it_loads_of_the_dequantized_model(case: str, tensor: int) -> None:
    """Each shard dequantizes its part alone; 4 devices have copies of the 2 kv heads."""
    checkpoint = HFCheckpoint.open(GOLDEN / case)
    mesh = MeshSpec(tensor=tensor).build(jax.devices())
    whole = {
        name: weight[(slice(None),) * len(weight.shape)].astype(ml_dtypes.bfloat16)
        for name, weight in dequantized(checkpoint.tensors, checkpoint.config).items()
    }
    config = {
        name: value for name, value in checkpoint.config.items() if name != "quantization_config"
    }
    ours, plain = (
        load_params(each, mesh)
        for each in (checkpoint, replace(checkpoint, tensors=whole, config=config))
    )
    assert ours["layers"][0]["qkv"].dtype == ml_dtypes.bfloat16
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_two_devices_hold_what_one_holds(case: str) -> None:
    checkpoint = HFCheckpoint.open(GOLDEN / case)
    one, two = (load_params(checkpoint, MeshSpec(tensor=n).build(jax.devices())) for n in (1, 2))
    for whole, halves in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(whole, halves)


BLOCK = (8, 8)


def in_fp8(checkpoint: HFCheckpoint) -> tuple[HFCheckpoint, HFCheckpoint]:
    """Return a checkpoint with experts in FP8, and one with the float32 numbers that these are.

    Names and the order of the scales' dimensions are those that vLLM's loader of Qwen3-VL expects,
    which divides gate_up_proj and gate_up_proj_scale_inv [E, D / rows, 2F / columns] alike.
    """
    stored = dict(checkpoint.tensors)
    plain = dict(checkpoint.tensors)
    rng = np.random.default_rng(0)
    for name in [name for name in stored if ".experts." in name]:
        values = np.asarray(stored[name]).astype(ml_dtypes.float8_e4m3fn)
        experts, *sizes = values.shape
        blocks = [-(-size // each) for size, each in zip(sizes, BLOCK, strict=True)]
        scales = rng.uniform(0.5, 2, (experts, *blocks)).astype(np.float32)
        stored[name] = values
        stored[f"{name}_scale_inv"] = scales
        spread = scales.repeat(BLOCK[0], axis=1).repeat(BLOCK[1], axis=2)
        plain[name] = values.astype(np.float32) * spread[:, : sizes[0], : sizes[1]]
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    config = {**checkpoint.config, "quantization_config": quantization}
    return replace(checkpoint, tensors=stored, config=config), replace(checkpoint, tensors=plain)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_vl_moe_newer"])
@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"expert": 2}])
def test_stacked_experts_in_fp8(name: str, axes: dict[str, int]) -> None:
    mesh = MeshSpec(**axes).build(jax.devices())
    both = in_fp8(HFCheckpoint.open(GOLDEN.parent / name))
    ours, plain = (load_params(each, mesh, dtype="float32") for each in both)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_bias_of_zeros_adds_nothing() -> None:
    """A bias of zeros, which old AutoGPTQ gave every layer, is ignored; another is refused."""
    checkpoint = HFCheckpoint.open(GOLDEN / "gptq_4bit")
    name = "model.layers.0.self_attn.o_proj.bias"
    bias = np.zeros(64, np.float16)
    load_params(replace(checkpoint, tensors={**checkpoint.tensors, name: bias}), one_device_mesh())
    bias[3] = 1
    with pytest.raises(ModelError, match=f"does not account for: {name}"):
        load_params(
            replace(checkpoint, tensors={**checkpoint.tensors, name: bias}), one_device_mesh()
        )


def test_nothing_of_the_libraries_is_forgotten() -> None:
    assert len(CASES) == 15
