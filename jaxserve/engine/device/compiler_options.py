"""Options of XLA that steps are compiled with."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

GRAPHS: Final = "xla_gpu_enable_command_buffer"
# What XLA:GPU records as one CUDA graph: its defaults, and loops. Without loops, the sampler's are
# launched by the host, which waits there until the device has finished the model. Measured on an
# H100, a decode step of Llama-3.1-8B takes 8.6 ms so and 6.4 ms as one graph (1 row).
IN_GRAPHS: Final = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"


def step_options(platform: str) -> Mapping[str, str]:
    """Return the options for a step on this platform.

    An option that XLA_FLAGS names is left as it is there.
    """
    if platform != "gpu" or GRAPHS in os.environ.get("XLA_FLAGS", ""):
        return MappingProxyType({})
    return MappingProxyType({GRAPHS: IN_GRAPHS})
