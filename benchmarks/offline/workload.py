"""The model and the requests that every side of benchmarks.offline gets."""

import json
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

PROMPT_TOKENS: Final = 128  # unless other prompts are asked for
EQUAL_TOKENS: Final = 64
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
# GeneratedTokens of rows 0, 302, 604, ... of AzureLLMInferenceTrace_conv.csv (Azure public dataset,
# CC-BY-4.0), scaled from 7..1000 to 8..128.
MIXED_LENGTHS: Final = [
    int(length)
    for length in """
    12 15 22 17 13 60 54 56 27 13 24 14 57 56 59 64 22 15 55 12 29 55 54 18 54 20 11 57 18 54
    21 21 14 19 17 18 18 18 14 56 17 23 18 53 18 21 57 20 13 55 54 21 22 31 59 27 61 30 19 59
    18 67 53 59
    """.split()
]


def job(streams: int, lengths: list[int], prompt_tokens: int) -> dict[str, Any]:
    """Return requests with random prompts and these numbers of tokens, `streams` at a time."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(3, CONFIG["vocab_size"], (len(lengths), prompt_tokens)).tolist()
    return {"streams": streams, "lengths": lengths, "prompts": prompts}


def write_model(folder: Path) -> None:
    """Write random weights in bfloat16, spread as a fresh model's."""
    rng = np.random.default_rng(0)
    d = CONFIG["hidden_size"]
    mlp = CONFIG["intermediate_size"]
    vocab = CONFIG["vocab_size"]
    kv = d // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (d, d) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (kv, d) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (mlp, d) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (d, mlp)}
    norms = [name for layer in range(CONFIG["num_hidden_layers"]) for name in _norms(layer)] + [
        "model.norm.weight"
    ]
    tensors = {
        name: rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    tensors |= {name: np.ones(d, ml_dtypes.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _norms(layer: int) -> list[str]:
    return [f"model.layers.{layer}.{name}_layernorm.weight" for name in ("input", "post_attention")]
