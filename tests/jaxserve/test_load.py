"""A whole folder: weights and tokenizer of one checkpoint."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from checkpoints.hf import HFCheckpoint
from jaxserve.errors import ModelError
from jaxserve.load import load, load_params, read_spec
from jaxserve.models.families import FAMILIES
from sharding.mesh import MeshSpec
from tests.jaxserve.models.decoder_harness import one_device_mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3_two_ropes"  # 96 rows of embedding


def folder_with(folder: Path, tokens: int, special: tuple[str, ...] = ()) -> Path:
    """The golden checkpoint with a tokenizer of so many plain tokens and some special ones behind them."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(tokens)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the tokenizer has 97 tokens, the model's vocabulary 96"):
        load(folder_with(tmp_path, 97), one_device_mesh())


def test_special_tokens_beyond_the_embedding_are_harmless(tmp_path: Path) -> None:
    """Gemma 3's text models share a tokenizer with those that see: its token for an image has no row."""
    model = load(folder_with(tmp_path, 96, ("<image>",)), one_device_mesh())
    assert model.tokenizer.vocab_size == 97 and model.spec.vocab_size == 96
    assert max(model.tokenizer.encode("w95 <image>")) < 96, "its name in a text is text"


@pytest.mark.parametrize("eos", [[1, 96], 96, -1, True, "2", list(range(17))])
def test_end_tokens_that_are_none(tmp_path: Path, eos: object) -> None:
    folder = folder_with(tmp_path, 96)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match=r"eos_token_id .*at most 16 ids of the vocabulary"):
        load(folder, one_device_mesh())


@pytest.mark.parametrize("name", ["phi3_window", "qwen3_attention_bias", "llama_mlp_bias", "olmo2_gqa"])
def test_shards_hold_what_one_device_holds(name: str) -> None:
    """Fused from separate tensors and from fused ones, weights and biases: every leaf bit for bit."""
    checkpoint = HFCheckpoint.open(GOLDEN.parent / name)
    whole = load_params(checkpoint, one_device_mesh())
    halves = load_params(checkpoint, MeshSpec(tensor=2).build(jax.devices()))
    assert (
        halves["layers"][0]["qkv"].sharding.shard_shape(whole["layers"][0]["qkv"].shape)[1] * 2
        == (whole["layers"][0]["qkv"].shape[1])
    )
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_name_table_that_forgets_a_part_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3's gate and up are one tensor: without a row for `up` nothing would be missing."""
    checkpoint = HFCheckpoint.open(GOLDEN.parent / "phi3_window")
    family, spec = read_spec(checkpoint.config)
    rows = [row for row in family.tensors(spec) if row.path[-1] != "up"]
    monkeypatch.setitem(FAMILIES, "Phi3ForCausalLM", replace(family, tensors=lambda spec: rows))
    with pytest.raises(ModelError, match="no row for some of gate, up"):
        load_params(checkpoint, one_device_mesh())
