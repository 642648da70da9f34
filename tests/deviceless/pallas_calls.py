"""Which Pallas kernels a compiled TPU program calls."""

import re
from collections import Counter

from jaxserve.engine.inspection import Module

NAME = re.compile(r'op_name="(?:[^"]*/)?(\w+)/pallas_call"')  # some compilers leave out what comes before


def pallas_calls(module: Module) -> Counter[str]:
    """How often each kernel stands in it, by the name it was given: in a loop's body once."""
    instructions = [i for body in module.values() for i in body.values()]
    calls = [i.rest for i in instructions if 'custom_call_target="tpu_custom_call"' in i.rest]
    return Counter(name for rest in calls for name in NAME.findall(rest))
