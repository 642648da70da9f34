"""Models to measure, as specs without a checkpoint.

They are those that ship with the planner, and a small one.
"""

from dataclasses import replace
from typing import Any, Final

from jaxserve.loading.spec import read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.model_config import read_config, shipped

SMALL: Final = "llama-0.5b"  # half a billion parameters, for a CPU
NAMES: Final = (SMALL, *shipped())


def config_of(name: str) -> dict[str, Any]:
    """Return the model's config.json."""
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
    """Return the spec of the whole model, or of its first layers, which compile faster."""
    spec = read_spec(config_of(name))[1]
    return replace(spec, num_layers=layers, layers=spec.layers[:layers]) if layers else spec
