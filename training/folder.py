"""Writes a trained model as a folder in Hugging Face's layout."""

import json
from pathlib import Path

import jax
from flax import nnx
from safetensors.flax import save

from jaxserve.tokenizer.sentencepiece_json import tokenizer_json
from training.recipe import Recipe
from training.tokens import BOS, CHAT_TEMPLATE, EOS, IM_END, IM_START, MARKS, UNK


def tensors(weights: nnx.State) -> dict[str, jax.Array]:
    """Return tensors by their Hugging Face names; linear weights as [outputs, inputs]."""
    named = {}
    for path, leaf in nnx.to_flat_state(weights):
        name = ".".join(["model", *map(str, path[:-1]), "weight"])
        named[name] = leaf[...].T if path[-1] == "kernel" else leaf[...]
    return named


def model_config(recipe: Recipe) -> dict:
    """Return the contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.model,
        "intermediate_size": recipe.mlp,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.context,
        "rms_norm_eps": recipe.norm_epsilon,
        "rope_theta": recipe.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": [IM_END, EOS],
    }


def tokenizer_config(recipe: Recipe) -> dict:
    """Return the contents of tokenizer_config.json."""
    names = {UNK: "<unk>", BOS: "<s>", EOS: "</s>", IM_START: MARKS[0], IM_END: MARKS[1]}
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    return {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(number): {"content": name} | flags for number, name in names.items()
        },
        "additional_special_tokens": list(MARKS),
        "bos_token": names[BOS],
        "eos_token": names[EOS],
        "unk_token": names[UNK],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "model_max_length": recipe.context,
    }


def write_folder(
    out: Path, recipe: Recipe, weights: nnx.State, tokenizer: bytes, account: dict
) -> None:
    """Write all files of the folder; account: the contents of training.json."""
    jsons = {
        "config.json": model_config(recipe),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": [IM_END, EOS]},
        "tokenizer_config.json": tokenizer_config(recipe),
        "training.json": account,
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in jsons.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "tokenizer.model").write_bytes(tokenizer)
    (out / "tokenizer.json").write_text(tokenizer_json(out))  # all that many programs read
    (out / "model.safetensors").write_bytes(save(tensors(weights), metadata={"format": "pt"}))
