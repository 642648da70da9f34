"""jaxserve: a JAX/XLA inference runtime for large language models on TPUs and GPUs.

from jaxserve import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.completion import Completion
    from jaxserve.config import EngineOptions
    from jaxserve.llm import LLM
    from jaxserve.request import SamplingParams

__all__ = ["LLM", "Completion", "EngineOptions", "SamplingParams"]

_HOMES = {
    "LLM": "llm",
    "Completion": "completion",
    "EngineOptions": "config",
    "SamplingParams": "request",
}


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562): the host half must not import jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(f"jaxserve.{_HOMES[name]}"), name)
