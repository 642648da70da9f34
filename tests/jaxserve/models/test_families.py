"""Reading of config.json and weights: what is supported, and the errors for the rest."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.errors import ModelError
from jaxserve.loading.spec import read_spec
from tests.jaxserve.loading.loaded import load_params
from tests.jaxserve.models.decoder_harness import one_device_mesh

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama_gqa" / name, tmp_path / name)
    return tmp_path


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, **tensors: np.ndarray | None) -> None:
    path = folder / "model.safetensors"
    changed = load_file(path) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in changed.items() if value is not None}, path)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"logit_softcap": 30.0}, "fields that this family does not understand: logit_softcap"),
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures .* are not implemented"),
    ({"architectures": None}, "architectures .* are not implemented"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
    ({"hidden_size": "64"}, "hidden_size is '64'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
    ({"num_attention_heads": 3}, "3 query heads do not divide by 2 kv heads"),
    (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        "rope_type 'spiral' is not implemented",
    ),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}},
        "lacks 'low_freq_factor', which the rope of type 'llama3' needs",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e4, "wobble": 2}},
        "type 'default' does not understand: wobble",
    ),
    ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor is 'x', not of the type"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        "rope_theta is 'x', not of",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        "config.json: rope_theta is 0; it must be a positive number",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1}},
        "rope_theta is 1; it must be more than 1",
    ),
    (
        {"rope_parameters": {"rope_type": ["linear"], "factor": 2}},
        r"rope_type \['linear'\] is not implemented",
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "factor is 0; it must be a positive number",
    ),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": -2}}, "factor is -2; it must be"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": [2]}},
        r"factor is \[2\], not of the type",
    ),
    (
        {"rope_parameters": LLAMA3 | {"high_freq_factor": 1}},
        "low_freq_factor 1.0 is not below high_freq_factor 1.0",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": float("inf")}},
        "beta_fast is inf",
    ),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object or null"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object or null"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a small positive number"),
    (
        {"architectures": "LlamaForCausalLM"},
        "architectures is 'LlamaForCausalLM'; it must be a list of names",
    ),
    (
        {"vocab_size": 97},
        r"tensor .*embed_tokens.* has shape \[96, 32\]; config.json makes it \[97, 32\]",
    ),
    ({"num_hidden_layers": 99}, "lacks .* tensors: model.layers"),
    ({"num_hidden_layers": 1}, "tensors that config.json does not account for: model.layers.1"),
    ({"attention_bias": True}, "lacks .* tensors: .*bias"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS, ids=[m for _, m in CONFIGS])
def test_config_that_is_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_config(folder, **fields)
    with pytest.raises((ModelError, CheckpointError), match=message) as caught:
        load_params(HFCheckpoint.open(folder), one_device_mesh())
    assert "\n" not in str(caught.value)


def test_parts_of_a_fused_tensor_must_fit(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "phi3_window" / name, tmp_path / name)
    change_config(tmp_path, num_key_value_heads=4)
    with pytest.raises(
        ModelError, match=r"qkv_proj\.weight has shape \[64, 32\]; config\.json makes it \[96, 32\]"
    ):
        load_params(HFCheckpoint.open(tmp_path), one_device_mesh())


def test_missing_tensor(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=None)
    with pytest.raises(ModelError, match=r"lacks 1 tensors: model\.norm\.weight"):
        load_params(HFCheckpoint.open(folder), one_device_mesh())


def test_tensor_left_over(folder: Path) -> None:
    change_tensors(folder, model__extra__weight=np.zeros(3, np.float32))
    with pytest.raises(ModelError, match=r"does not account for: model\.extra\.weight"):
        load_params(HFCheckpoint.open(folder), one_device_mesh())


def test_inverse_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    change_tensors(
        folder, **{"model__layers__0__self_attn__rotary_emb__inv_freq": np.zeros(4, np.float32)}
    )
    load_params(HFCheckpoint.open(folder), one_device_mesh())


def test_nan_weight_is_refused(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=np.full(32, np.nan, np.float32))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_params(HFCheckpoint.open(folder), one_device_mesh())


def test_integer_weight_is_refused(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=np.ones(32, np.int32))
    with pytest.raises(ModelError, match="int32"):
        load_params(HFCheckpoint.open(folder), one_device_mesh(), dtype="float32")


def test_head_stored_beside_a_tied_embedding(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama_tied" / name, folder / name)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lm_head__weight=embedding)
    load_params(HFCheckpoint.open(folder), one_device_mesh())
    change_tensors(folder, lm_head__weight=embedding + 1)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load_params(HFCheckpoint.open(folder), one_device_mesh())


@pytest.mark.parametrize(
    ("stored", "asked", "kept"),
    [
        (np.float32, "auto", "float32"),
        (np.float16, "auto", "bfloat16"),
        (ml_dtypes.bfloat16, "auto", "bfloat16"),
        (ml_dtypes.bfloat16, "float32", "float32"),
        (np.float32, "bfloat16", "bfloat16"),
        (np.float64, "auto", "float32"),
    ],
)
def test_dtype(folder: Path, stored: type, asked: str, kept: str) -> None:
    original = load_file(folder / "model.safetensors")
    save_file(
        {name: value.astype(stored) for name, value in original.items()},
        folder / "model.safetensors",
    )
    params = load_params(HFCheckpoint.open(folder), one_device_mesh(), dtype=asked)
    assert str(params["embed"].dtype) == kept
    embedding = original["model.embed_tokens.weight"].astype(stored)
    np.testing.assert_array_equal(
        np.asarray(params["embed"]), embedding.astype(params["embed"].dtype)
    )


def test_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ModelError, match="--dtype is int3; choose"):
        load_params(HFCheckpoint.open(folder), one_device_mesh(), dtype="int3")


@pytest.mark.parametrize("case", ["qwen2_window", "qwen3_window"])
def test_layers_of_qwen_from_max_window_layers_on_have_a_window(case: str) -> None:
    """Windows follow from max_window_layers where a config, as published, has no layer_types."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    kinds = config.pop("layer_types")
    assert set(kinds) == {"full_attention", "sliding_attention"}
    _, spec = read_spec(config)
    found = [layer.window for layer in spec.layers]
    sizes = {"full_attention": None, "sliding_attention": config["sliding_window"]}
    assert found == [sizes[kind] for kind in kinds]
