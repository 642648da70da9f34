"""Shapes of published models, as their config.json gives them, and specs of them without a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.load import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.spec import ModelSpec
from sharding.params import map_specs


def _config(
    family: str, d: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, positions: int, **more: Any
) -> dict[str, Any]:
    architecture, model_type = family.split("/")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": d,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        **more,
    }


LLAMA_31 = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
CONFIGS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama-3.1-8b": _config("LlamaForCausalLM/llama", 4096, 14336, 32, 32, 8, 128256, 131072, **LLAMA_31),
        "llama-3.1-70b": _config("LlamaForCausalLM/llama", 8192, 28672, 80, 64, 8, 128256, 131072, **LLAMA_31),
        "qwen3-8b": _config(
            "Qwen3ForCausalLM/qwen3",
            *(4096, 12288, 36, 32, 8, 151936, 40960),
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            tie_word_embeddings=False,
        ),
        "gemma-3-27b": _config(
            "Gemma3ForCausalLM/gemma3_text",
            *(5376, 21504, 62, 32, 16, 262208, 131072),
            head_dim=128,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=168,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            rope_local_base_freq=10000.0,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            sliding_window=1024,
            sliding_window_pattern=6,
        ),
        # Half a billion parameters, for a CPU.
        "llama-0.5b": _config("LlamaForCausalLM/llama", 1024, 4864, 24, 16, 8, 32000, 2048, rms_norm_eps=1e-5),
    }
)


def spec_of(name: str, layers: int | None = None) -> ModelSpec:
    """Of the whole model, or of its first layers: its steps compile the faster."""
    spec = read_spec(CONFIGS[name])[1]
    return replace(spec, num_layers=layers, windows=spec.windows and spec.windows[:layers]) if layers else spec


def abstract_params(spec: ModelSpec, mesh: Mesh, dtype: str = "bfloat16") -> dict:
    """Shapes, dtypes and shardings of the parameters; ShardingError where the mesh does not divide them.

    spec: already on the mesh's devices, see ModelSpec.on.
    """
    return map_specs(lambda param: param.abstract(mesh), param_specs(spec, jnp.dtype(dtype)))
