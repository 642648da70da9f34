"""Inspection of a compiled step: bytes per device, unwanted copies, and collectives.

Nothing has to run for it, so steps can be inspected for absent devices (sharding/aot_devices.py).
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

# Bytes of a weight that must not be copied. Copies of smaller ones (norms, biases) cost nothing,
# and activations have their sizes too.
LARGE = 2**20
# Computations that a reduction applies to single numbers.
REDUCER = re.compile(r"to_apply=%?([\w.\-]+)|called_computations=\{%?([\w.\-]+)")
CORE_MEMORY = re.compile(r"S\([13]\)")  # in a layout: a TPU core's VMEM, a v4's CMEM
MOVES = {"copy", "transpose", "all-gather"}
# A fusion of nothing but these is a copy.
PARTS_OF_A_COPY = MOVES | {"parameter", "constant", "bitcast", "reshape", "convert", "fusion"}
# Operations that write in place, where their result is an aliased argument.
IN_PLACE = {"scatter", "dynamic-update-slice"}


@dataclass(frozen=True)
class Inspection:
    """Figures of a compiled step; bytes are of one device.

    Counts of instructions have those of a loop's body once, and those of every branch.
    """

    arguments: int  # bytes
    temporaries: int  # bytes
    aliased: int  # bytes of the arguments that are updated in place
    unaliased: int  # bytes of results that are no argument: the download
    program: int  # bytes of the step itself, as long as it is loaded
    copies: tuple[str, ...]  # instructions that copy a weight or a layer's pages
    collectives: dict[str, int]  # number of instructions, by operation
    sent: dict[str, int]  # bytes that a launch sends to other devices, by collective
    kernels: int  # number of instructions that are launched


def inspect(compiled: jax.stages.Compiled, lowering: Lowering) -> Inspection:
    """Inspect a compiled step of `lowering`; ConfigError where its compiler gives no figures."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError("the compiler reports no memory figures for this device")
    module = parse(compiled.as_text() or "")
    running = [i for body in bodies_that_run(module) for i in body.values()]
    # Of all computations, since some collectives are fused.
    ops = Counter(i.op for body in module.values() for i in body.values() if not i.done)
    weights = sizes_of(lowering.params)
    pages = sizes_of([lowering.state.kept, lowering.state.drafter])
    return Inspection(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        unaliased=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        program=memory.generated_code_size_in_bytes,
        copies=tuple(find_copies(module, weights, pages)),
        collectives={op: ops[op] for op in COLLECTIVES if ops[op]},
        sent=bytes_sent(module, lowering.mesh.size),
        kernels=sum(i.makes_arrays or i.op == "custom-call" for i in running),
    )


def find_copies(module: Module, weights: set[int], pages: set[int]) -> list[str]:
    """Name the instructions that make a second copy of a weight or of pages.

    `weights` and `pages` are numbers of elements, by which the arrays are known. Any instruction
    that makes an array of the pages' size without writing in place copies pages, even a select.
    Activations may have the size of a weight, so only instructions that merely move numbers copy a
    weight. A copy to a TPU core's own memory does not count.
    """

    def copies(i: Instruction) -> bool:
        if not i.makes_arrays or (i.op == "copy" and CORE_MEMORY.search(i.result)):
            return False
        if pages.intersection(i.sizes) and not _in_place(i, pages, module):
            return True
        return bool(weights.intersection(i.sizes)) and _only_moves(i, module)

    return [i.name for body in bodies_that_run(module) for i in body.values() if copies(i)]


def _only_moves(i: Instruction, module: Module) -> bool:
    """Return whether an instruction moves numbers and computes none."""
    if i.op == "fusion":
        return set(_fused_operations(i, module)) <= PARTS_OF_A_COPY
    return i.op in MOVES | {"reshape", "convert"}


def bodies_that_run(module: Module) -> Iterator[Body]:
    """Yield the computations whose instructions run one by one.

    Fused computations do not, nor those that a reduction applies to single numbers.
    """
    instructions = [i for body in module.values() for i in body.values()]
    inner = {name for i in instructions for name in CALLED.findall(i.rest)}
    for i in instructions:
        if i.op != "call":
            inner |= {name for names in REDUCER.findall(i.rest) for name in names}
    return (body for name, body in module.items() if name not in inner)


def _fused_operations(fusion: Instruction, module: Module) -> Iterator[str]:
    """Yield the operations that a fusion is made of, those of fusions inside it among them."""
    for name in CALLED.findall(fusion.rest):
        for inner in module.get(name, {}).values():
            yield inner.op
            yield from _fused_operations(inner, module)


def _in_place(i: Instruction, pages: set[int], module: Module) -> bool:
    """Return whether all results of the pages' size are written in place."""
    if i.op != "fusion":
        return i.op in IN_PLACE
    for name in CALLED.findall(i.rest):
        body = module.get(name, {})
        roots = [inner for inner in body.values() if inner.root]
        if not all(_root_in_place(root, body, pages, module) for root in roots):
            return False
    return True


def _root_in_place(i: Instruction, body: Body, pages: set[int], module: Module) -> bool:
    """Return whether a fused computation's results of the pages' size are written in place.

    `i` is the root of the computation `body`, or an operand that the root hands on.
    """
    if i.op in ("bitcast", "tuple"):
        operands = [body[name] for name in i.operands if name in body]
        of_pages = [operand for operand in operands if pages.intersection(operand.sizes)]
        return all(_root_in_place(operand, body, pages, module) for operand in of_pages)
    return _in_place(i, pages, module)


def sizes_of(arrays: Any) -> set[int]:
    """Return the numbers of elements of all large arrays in a pytree, whole and of one shard."""
    large = [x for x in jax.tree.leaves(arrays) if _shard_size(x) * x.dtype.itemsize >= LARGE]
    return {math.prod(x.shape) for x in large} | {_shard_size(x) for x in large}


def _shard_size(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape))
