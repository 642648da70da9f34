"""Models to measure: those that ship with the planner, and a small one; specs of them without a checkpoint."""

from dataclasses import replace
from typing import Any, Final

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.load import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.model import read_config, shipped
from sharding.params import map_specs

SMALL: Final = "llama-0.5b"  # half a billion parameters, for a CPU
NAMES: Final = (SMALL, *shipped())


def config_of(name: str) -> dict[str, Any]:
    """Its config.json."""
    if name != SMALL:
        return read_config(name)[1]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }


def spec_of(name: str, layers: int | None = None) -> ModelSpec:
    """Of the whole model, or of its first layers: its steps compile the faster."""
    spec = read_spec(config_of(name))[1]
    return replace(spec, num_layers=layers, windows=spec.windows and spec.windows[:layers]) if layers else spec


def abstract_params(spec: ModelSpec, mesh: Mesh, dtype: str = "bfloat16") -> dict:
    """Shapes, dtypes and shardings of the parameters; ShardingError where the mesh does not divide them.

    spec: already on the mesh's devices, see ModelSpec.on.
    """
    return map_specs(lambda param: param.abstract(mesh), param_specs(spec, jnp.dtype(dtype)))
