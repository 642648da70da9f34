"""Options of XLA that steps are compiled with."""

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax

GRAPHS: Final = "xla_gpu_enable_command_buffer"
# Kinds of launches that XLA:GPU records in CUDA graphs: its defaults, and loops. Without WHILE the
# host launches the sampler's loops, and waits there until the device has finished the model: on an
# H100, a decode step of Llama-3.1-8B with one row then takes 8.6 ms in place of 6.4.
RECORDED: Final = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
RECORDED_SINCE_0_12: Final = f"{RECORDED},COLLECTIVES_KERNEL"  # earlier versions do not know it


def step_options(platform: str, decodes: int = 1) -> Mapping[str, str]:
    """Return the options for a step of so many decodes on this platform.

    Several decodes are a loop around the model: it stays outside the graphs, as no GPU has run it
    inside. An option that XLA_FLAGS sets is left as it is there.
    """
    if platform != "gpu" or decodes > 1:
        return MappingProxyType({})
    if re.search(rf"--{GRAPHS}(=|\s|$)", os.environ.get("XLA_FLAGS", "")):
        return MappingProxyType({})
    is_newer = jax.__version_info__ >= (0, 12)
    return MappingProxyType({GRAPHS: RECORDED_SINCE_0_12 if is_newer else RECORDED})
