"""Loading a whole folder: weights and tokenizer of one checkpoint."""

import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import models, pre_tokenizers

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.checkpoints.quantized import dequantized
from jaxserve.errors import ModelError
from jaxserve.loading.folder import load, open_model
from jaxserve.loading.match import match_tensors
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.families import FAMILIES
from jaxserve.models.families.weight_table import by_parameter
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.errors import ShardingError
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import is_param_spec, map_specs
from jaxserve.tokenizer import TokenizerError
from tests.jaxserve.loading.loaded import load_params
from tests.jaxserve.models.decoder_harness import one_device_mesh

GOLDEN = Path(__file__).parents[2] / "golden" / "gemma3_two_ropes"  # 96 rows of embedding
LLAMA = ModelSpec("llama", 96, 48, 1, 32, 8, 8, 96, 1e-5, 64)


def folder_with(folder: Path, tokens: int, special: tuple[str, ...] = ()) -> Path:
    """Write the golden checkpoint with a tokenizer of `tokens` plain tokens and special ones."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(tokens)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    refused = "its token 'w96' has the id 96, the model's vocabulary the ids 0 to 95"
    with pytest.raises(TokenizerError, match=refused):
        open_model(folder_with(tmp_path, 97))


def test_an_unsupported_tokenizer_is_named_with_an_unsupported_config(tmp_path: Path) -> None:
    folder_with(tmp_path, 96)
    (tmp_path / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    with pytest.raises(ModelError, match="'OtherForCausalLM'") as only_config:
        open_model(tmp_path)
    assert "tokenizer" not in str(only_config.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"'OtherForCausalLM'.*; and .*not a tokenizer.json"):
        open_model(tmp_path)


def test_special_tokens_beyond_the_embedding_are_harmless(tmp_path: Path) -> None:
    """Gemma 3's text models have the tokenizer of multimodal models.

    Its token for an image has no row in the embedding.
    """
    model = load(open_model(folder_with(tmp_path, 96, ("<image>",))), one_device_mesh())
    assert model.tokenizer.vocab_size == model.spec.vocab_size == 96
    assert model.tokenizer.missing_tokens == {"<image>": 96}
    assert max(model.tokenizer.encode("w95 <image>")) < 96, "its name in a text is text"


@pytest.mark.parametrize(
    "name", ["phi3_window", "qwen3_attention_bias", "llama_mlp_bias", "olmo2_gqa", "glm4_gqa"]
)
def test_shards_hold_what_one_device_holds(name: str) -> None:
    """Leaves are equal bit for bit: fused from separate and fused tensors, weights and biases."""
    checkpoint = HFCheckpoint.open(GOLDEN.parent / name)
    whole = load_params(checkpoint, one_device_mesh())
    halves = load_params(checkpoint, MeshSpec(tensor=2).build(jax.devices()))
    assert (
        halves["layers"][0]["qkv"].sharding.shard_shape(whole["layers"][0]["qkv"].shape)[1] * 2
        == (whole["layers"][0]["qkv"].shape[1])
    )
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *[("llama_mqa", 2), ("llama_mqa", 4), ("qwen2_gqa", 4), ("phi3_window", 4)],
        *[("glm4_gqa", 4), ("glm_mqa", 4)],
    ],
)
def test_kv_heads_that_several_devices_need(name: str, tensor: int) -> None:
    """Each device has its queries in order, with the key and value of their kv head."""
    checkpoint = HFCheckpoint.open(GOLDEN.parent / name)
    one, spread = (
        load_params(checkpoint, MeshSpec(tensor=n).build(jax.devices())) for n in (1, tensor)
    )
    for whole, split in zip(one["layers"], spread["layers"], strict=True):
        whole, split = np.asarray(whole["qkv"]), np.asarray(split["qkv"])  # [D, K, Q, H]
        assert split.shape[1] == tensor
        queries = [
            weights[:, :, :-2].reshape(len(whole), -1, whole.shape[-1])
            for weights in (whole, split)
        ]
        np.testing.assert_array_equal(*queries)
        np.testing.assert_array_equal(
            split[:, :, -2:], whole[:, :, -2:].repeat(tensor // whole.shape[1], axis=1)
        )


def test_copies_are_no_parameters(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 96)
    one, four = (load(open_model(folder), MeshSpec(tensor=n).build(jax.devices())) for n in (1, 4))
    assert (one.spec.kv_copies, four.spec.kv_copies) == (1, 2)
    assert (
        one.parameters == four.parameters == sum(leaf.size for leaf in jax.tree.leaves(one.params))
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "held"), [(32, 8, 8, 8), (32, 8, 16, 16), (32, 1, 4, 4)]
)
def test_kv_heads_on_devices(heads: int, kv_heads: int, tensor: int, held: int) -> None:
    assert replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads).on(tensor).num_kv_heads == held


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(30, 3, 4), (24, 8, 16), (32, 8, 6)])
def test_kv_heads_that_do_not_come_out_even_are_refused(
    heads: int, kv_heads: int, tensor: int
) -> None:
    spec = replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads).on(tensor)
    assert spec.num_kv_heads == kv_heads
    with pytest.raises(
        ShardingError, match=f"axis [KN] .* does not divide by mesh axis 'tensor' of size {tensor}"
    ):
        map_specs(
            lambda param: param.abstract(MeshSpec(tensor=tensor).build(jax.devices() * 2)),
            param_specs(spec, jnp.dtype(jnp.float32)),
        )


def test_every_tensor_of_deepseek_r1_has_its_parameter(data_folder: Path) -> None:
    """All 91,991 names and shapes are matched, and none is left over.

    They include scales and the layer that proposes tokens.
    """
    folder = data_folder / "shapes" / "deepseek_r1"
    config = json.loads((folder / "config.json").read_text())
    names = json.loads((folder / "r1_hf_ckpt_params_map.json").read_text())
    dtypes = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    stored = {
        name: np.broadcast_to(np.zeros((), dtypes[entry["dtype"]]), entry["shape"])
        for name, entry in names.items()
    }
    family, spec = read_spec(config)
    table = match_tensors(family, spec, dequantized(stored, config))
    for row in table:
        assert list(stored[row.name].shape) == row.shape(spec.sizes(row.block)), row
    params = param_specs(spec, jnp.dtype(jnp.bfloat16))
    for path, rows in by_parameter(table).items():
        param = functools.reduce(lambda holder, step: holder[step], path, params)
        assert sum(row.size(param.axes, spec.sizes(row.block)) for row in rows) == math.prod(
            param.shape
        ), path
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params, is_leaf=is_param_spec))
    assert count == 671_026_419_200  # as published


@pytest.mark.parametrize(
    "name", ["deepseek_v3_q_lora", "glm4_moe_groups", "ernie4_5_moe_every_second"]
)
def test_routers_stay_float32_in_a_checkpoint_of_bfloat16(name: str, tmp_path: Path) -> None:
    golden = GOLDEN.parent / name
    shutil.copy(golden / "config.json", tmp_path)
    stored = load_file(golden / "model.safetensors")
    routers = [name for name in stored if name.endswith("mlp.gate.weight")]
    assert routers
    kept = {name for name in stored if "mlp.gate." in name or "moe_statics" in name}
    rounded = {
        name: x if name in kept else x.astype(ml_dtypes.bfloat16) for name, x in stored.items()
    }
    save_file(rounded, tmp_path / "model.safetensors")

    params = load_params(HFCheckpoint.open(tmp_path), one_device_mesh())
    assert params["embed"].dtype == jnp.bfloat16
    held = [layer["router"] for layer in params["layers"] if "router" in layer]
    for router, stored_name in zip(held, routers, strict=True):
        assert router.dtype == jnp.float32
        np.testing.assert_array_equal(router, stored[stored_name].T)


def test_a_state_in_float32_leaves_the_other_weights_as_they_are(tmp_path: Path) -> None:
    """Files of Qwen3.5 have the decays and the norm behind a state in float32."""
    golden = GOLDEN.parent / "qwen3_5"
    shutil.copy(golden / "config.json", tmp_path)
    stored = load_file(golden / "model.safetensors")
    wide = ("A_log", "linear_attn.norm.weight")
    rounded = {
        name: x if name.endswith(wide) else x.astype(ml_dtypes.bfloat16)
        for name, x in stored.items()
    }
    save_file(rounded, tmp_path / "model.safetensors")
    params = load_params(HFCheckpoint.open(tmp_path), one_device_mesh())
    first = params["layers"][0]
    assert params["embed"].dtype == first["state_norm"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        first["decay_log"].reshape(-1), stored["model.layers.0.linear_attn.A_log"]
    )


def test_a_name_table_that_forgets_a_part_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table without a row for Phi-3's `up` lacks no tensor: gate and up are one."""
    checkpoint = HFCheckpoint.open(GOLDEN.parent / "phi3_window")
    family, spec = read_spec(checkpoint.config)
    rows = [row for row in family.tensors(spec) if row.path[-1] != "up"]
    monkeypatch.setitem(FAMILIES, "Phi3ForCausalLM", replace(family, tensors=lambda spec: rows))
    with pytest.raises(
        ModelError, match=r"has 768 of the 1536 numbers of \('layers', 0, 'gate_up'\)"
    ):
        load_params(checkpoint, one_device_mesh())
