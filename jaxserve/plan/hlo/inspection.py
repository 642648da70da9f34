"""What the compiler says of a step that it has compiled: bytes per device, what it copies, what it
exchanges.

Nothing has to run for it, so it serves devices that are not here (sharding/aot_devices.py) as well.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.engine.device.lowering import Lowering
from jaxserve.errors import ConfigError
from jaxserve.plan.hlo.collectives import COLLECTIVES, bytes_sent
from jaxserve.plan.hlo.parser import CALLED, Body, Instruction, Module, parse

# Bytes. Smaller weights (norms, biases) may be copied: it costs nothing, and activations have their
# sizes too.
LARGE = 2**20
REDUCER = re.compile(r"to_apply=%?([\w.\-]+)|called_computations=\{%?([\w.\-]+)")
NEAR = re.compile(r"S\([13]\)")  # in a layout: a TPU core's VMEM, a v4's CMEM
MOVES = {"copy", "transpose", "all-gather"}
SHIFTS = MOVES | {
    "parameter",
    "constant",
    "bitcast",
    "reshape",
    "convert",
    "fusion",
}  # all that a fused copy consists of
WRITES = {"scatter", "dynamic-update-slice"}  # in place, where the result is an aliased argument


@dataclass(frozen=True)
class Inspection:
    """Bytes are of one device. kernels and collectives count instructions: of a loop's body once,
    of every branch.
    """

    arguments: int
    temporaries: int
    aliased: int  # of the arguments, what is updated in place
    fresh: int  # results that are no argument: the download
    program: int  # the step itself, as long as it is loaded
    copies: tuple[
        str, ...
    ]  # instructions that make a second copy of a weight or of a layer's pages
    collectives: dict[str, int]
    sent: dict[str, int]  # bytes that a launch sends away, by collective
    kernels: int


def inspect(compiled: jax.stages.Compiled, lowering: Lowering) -> Inspection:
    """Of a step of `lowering`; ConfigError where a compiler gives no figures."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError("the compiler reports no memory figures for this device")
    module = parse(compiled.as_text() or "")
    running = [i for body in _running(module) for i in body.values()]
    ops = Counter(
        i.op for body in module.values() for i in body.values() if not i.done
    )  # some are fused
    return Inspection(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        fresh=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        program=memory.generated_code_size_in_bytes,
        copies=tuple(
            find_copies(
                module,
                _sizes(lowering.params),
                _sizes([lowering.state.pages, lowering.state.drafter]),
            )
        ),
        collectives={op: ops[op] for op in COLLECTIVES if ops[op]},
        sent=bytes_sent(module, lowering.mesh.size),
        kernels=sum(i.runs or i.op == "custom-call" for i in running),
    )


def find_copies(module: Module, weights: set[int], pages: set[int]) -> list[str]:
    """Names of the instructions that make a second copy of a weight or of pages, known by their
    number of elements.

    Activations may have as many as a weight, so only what merely moves numbers is a copy of one;
    but whatever makes an array of the pages' size without writing in place is one of pages, if it
    is only by a select. A trip to a TPU core's own memory and back is none.
    """

    def copies(i: Instruction) -> bool:
        if not i.runs or (i.op == "copy" and NEAR.search(i.result)):
            return False
        if pages.intersection(i.sizes) and not _in_place(i, pages, module):
            return True
        moves = MOVES | {"reshape", "convert"}
        return bool(weights.intersection(i.sizes)) and (
            i.op in moves or (i.op == "fusion" and set(_inside(i, module)) <= SHIFTS)
        )

    return [i.name for body in _running(module) for i in body.values() if copies(i)]


def _running(module: Module) -> Iterator[Body]:
    """Computations whose instructions run one by one: neither fused nor applied to single
    numbers."""
    instructions = [i for body in module.values() for i in body.values()]
    inner = {name for i in instructions for name in CALLED.findall(i.rest)}
    for i in instructions:
        if i.op != "call":
            inner |= {name for names in REDUCER.findall(i.rest) for name in names}
    return (body for name, body in module.items() if name not in inner)


def _inside(fusion: Instruction, module: Module) -> Iterator[str]:
    """The operations that a fusion is made of; fusions may lie in fusions."""
    for name in CALLED.findall(fusion.rest):
        for inner in module.get(name, {}).values():
            yield inner.op
            yield from _inside(inner, module)


def _in_place(i: Instruction, pages: set[int], module: Module) -> bool:
    """Whether a result of the pages' size is written where it lies; of a fusion, all of its results
    of that size.
    """
    if i.op != "fusion":
        return i.op in WRITES
    for name in CALLED.findall(i.rest):
        body = module.get(name, {})
        if not all(_written(root, body, pages, module) for root in body.values() if root.root):
            return False
    return True


def _written(i: Instruction, body: Body, pages: set[int], module: Module) -> bool:
    """The same of the value at a fusion's end, in the fused computation `body`."""
    if i.op in ("bitcast", "tuple"):
        ends = [body[name] for name in i.operands if name in body]
        return all(
            _written(end, body, pages, module) for end in ends if pages.intersection(end.sizes)
        )
    return _in_place(i, pages, module)


def _sizes(arrays: Any) -> set[int]:
    """Elements of every large array, whole and of one shard."""
    large = [x for x in jax.tree.leaves(arrays) if _shard_size(x) * x.dtype.itemsize >= LARGE]
    return {math.prod(x.shape) for x in large} | {_shard_size(x) for x in large}


def _shard_size(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape))
