"""Pallas kernels that a compiled program of a TPU or a GPU calls."""

import re
from collections import Counter

from jaxserve.plan.hlo.parser import Module

CALL = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"')
# Some compilers leave out the path before the kernel's name.
NAME = re.compile(r'op_name="(?:[^"]*/)?(\w+)/(?:pallas_call|mpmd_map)"')


def pallas_calls(module: Module) -> Counter[str]:
    """Count the calls of each kernel by its name; those in a loop's body count once."""
    instructions = [i for body in module.values() for i in body.values()]
    calls = [i.rest for i in instructions if CALL.search(i.rest)]
    return Counter(name for rest in calls for name in NAME.findall(rest))
