"""Python client of jaxserve's gRPC API; it needs no jax.

from jaxserve.client import Client

with Client("127.0.0.1:50051") as client:
    print(client.generate("Once upon a time", max_tokens=32).choices[0].text)
    for event in client.stream("Once upon a time", temperature=0):
        ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.client.aio import AsyncClient, AsyncStream
    from jaxserve.client.channel import TLS
    from jaxserve.client.client import Client, Stream
    from jaxserve.client.collect import join
    from jaxserve.client.descriptions import Loads, ModelInfo, ServerInfo
    from jaxserve.client.errors import CallError
    from jaxserve.client.messages import ChatOptions, Messages, Options, Prompt
    from jaxserve.client.results import (
        Choice,
        ChoiceFinish,
        Delta,
        Embedded,
        Event,
        Finish,
        Logprob,
        PromptInfo,
        PromptLogprobs,
        Result,
        Score,
        Timings,
        Tokenized,
        TokenLogprob,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from jaxserve.sampling_params import SamplingParams

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncStream",
    "CallError",
    "ChatOptions",
    "Choice",
    "ChoiceFinish",
    "Client",
    "Delta",
    "Embedded",
    "Event",
    "Finish",
    "Loads",
    "Logprob",
    "Messages",
    "ModelInfo",
    "Options",
    "Prompt",
    "PromptInfo",
    "PromptLogprobs",
    "Result",
    "SamplingParams",
    "Score",
    "ServerInfo",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tokenized",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "join",
]

_MODULES = ("client", "channel", "errors", "messages", "results", "descriptions", "collect", "aio")


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that `jaxserve client` starts without gRPC.

    Python runs this file before `__main__`, which takes care of Ctrl-C; importing gRPC takes long.
    """
    if name in __all__:
        for module in map(import_module, (f"jaxserve.client.{home}" for home in _MODULES)):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'jaxserve.client' has no attribute {name!r}")
