"""Which Pallas kernels a compiled program of a TPU or a GPU calls."""

import re
from collections import Counter

from jaxserve.plan.hlo.parser import Module

CALL = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"')
NAME = re.compile(
    r'op_name="(?:[^"]*/)?(\w+)/(?:pallas_call|mpmd_map)"'
)  # some compilers leave out what comes before


def pallas_calls(module: Module) -> Counter[str]:
    """How often each kernel stands in it, by the name it was given: in a loop's body once."""
    instructions = [i for body in module.values() for i in body.values()]
    calls = [i.rest for i in instructions if CALL.search(i.rest)]
    return Counter(name for rest in calls for name in NAME.findall(rest))
