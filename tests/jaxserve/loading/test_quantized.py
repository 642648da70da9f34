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
