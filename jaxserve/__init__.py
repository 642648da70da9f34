"""jaxserve: a JAX/XLA inference runtime for large language models on TPUs and GPUs.

from jaxserve import LLM, SamplingParams

with LLM("folder/of/a/checkpoint") as llm:
    (completion,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

AsyncLLM has the same calls for coroutines.
"""

TYPE_CHECKING = False  # type checkers take it for True; to import typing takes 10 ms
if TYPE_CHECKING:
    from typing import Any

    from jaxserve.async_llm import AsyncLLM
    from jaxserve.completion import Completion
    from jaxserve.config import EngineOptions
    from jaxserve.llm import LLM
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.structure import Structure

__version__ = "0.2.0"

__all__ = ["LLM", "AsyncLLM", "Completion", "EngineOptions", "SamplingParams", "Structure"]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Completion": "completion",
    "EngineOptions": "config",
    "SamplingParams": "sampling_params",
    "Structure": "structure",
}


def __getattr__(name: str) -> "Any":
    """Import a public name on first use (PEP 562).

    Parts of jaxserve that run without jax, such as the client, import this package, too. A name
    of another library raises ImportError, not AttributeError, so that hasattr raises as well.
    """
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"jaxserve.{_HOMES[name]}"), name)
    names = import_module("jaxserve.names_elsewhere").PACKAGE_NAMES
    if name in names:
        # `from jaxserve import ...` would hide the text of an AttributeError.
        raise ImportError(f"jaxserve has no {name}: {names[name]}", name=name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
