"""What the compiler says of a step that it has compiled: bytes per device, what it copies, what it exchanges.

Nothing has to run for it, so it serves devices that are not here (sharding/absent.py) as well.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.engine.lowering import Lowering
from jaxserve.errors import ConfigError

# Bytes. Smaller weights (norms, biases) may be copied: it costs nothing, and activations have their sizes too.
LARGE = 2**20
HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")  # root, name, type, op, the rest
SHAPE = re.compile(r"\w+\[([\d,]*)\]")
OPERANDS_OF_A_START = re.compile(r"^\(\(.*?\), (?=\w+\[|\()")
CALLED = re.compile(r"calls=%?([\w.\-]+)")
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
# Those that make no array of their own; of a custom call nobody can tell, and its temporaries are counted anyway.
SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all"}
CALLS = {"while", "conditional", "call", "custom-call"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Inspection:
    """Bytes are of one device. kernels counts instructions that run: of a loop's body once, of every branch."""

    arguments: int
    temporaries: int
    aliased: int  # of the arguments, what is updated in place
    fresh: int  # results that are no argument: the download
    copies: tuple[str, ...]  # instructions that make a second copy of a weight or of a layer's pages
    collectives: dict[str, int]
    kernels: int


@dataclass(frozen=True)
class Instruction:
    """op: without the suffix of an asynchronous one. sizes: elements of each array of the result."""

    name: str
    op: str
    result: str
    rest: str
    root: bool
    done: bool

    @property
    def sizes(self) -> list[int]:
        return [math.prod(int(n) for n in dims.split(",") if n) for dims in SHAPE.findall(self.result)]

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def runs(self) -> bool:
        return self.op not in SILENT | CALLS and not self.done


Module = dict[str, dict[str, Instruction]]  # computations by name, their instructions by name


def inspect(compiled: jax.stages.Compiled, lowering: Lowering) -> Inspection:
    """Of a step of `lowering`; ConfigError where a compiler gives no figures."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError("the compiler reports no memory figures for this device")
    module = parse(compiled.as_text() or "")
    running = [i for body in _running(module) for i in body.values()]
    ops = Counter(i.op for body in module.values() for i in body.values() if not i.done)  # some are fused
    return Inspection(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        fresh=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        copies=tuple(find_copies(module, _sizes(lowering.params), _sizes(lowering.state.pages))),
        collectives={op: ops[op] for op in COLLECTIVES if ops[op]},
        kernels=sum(i.runs or i.op == "custom-call" for i in running),
    )


def parse(text: str) -> Module:
    """The text of a compiled HLO module."""
    module: Module = {}
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := HEADER.match(line):
            body = module[header[1]] = {}
        elif found := INSTRUCTION.match(line):
            root, name, result, op, rest = found.groups()
            plain = re.sub("-(start|update|done)$", "", op)
            if op.endswith("-start"):
                result = OPERANDS_OF_A_START.sub("(", result)
            done = op.endswith(("-done", "-update")) and plain != "dynamic"  # dynamic-update-slice ends otherwise
            body[name] = Instruction(name, plain, result, rest, bool(root), done)
    return module


def find_copies(module: Module, weights: set[int], pages: set[int]) -> list[str]:
    """Names of the instructions that make a second copy of a weight or of pages, known by their number of elements.

    Activations may have as many as a weight, so only what merely moves numbers is a copy of one; but whatever makes an
    array of the pages' size without writing in place is one of pages, if it is only by a select. A trip to a TPU core's
    own memory and back is none.
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


def _running(module: Module) -> Iterator[dict[str, Instruction]]:
    """Computations whose instructions run one by one: neither fused nor applied to single numbers."""
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
    """Whether a result of the pages' size is written where it lies; of a fusion, all of its results of that size."""
    if i.op != "fusion":
        return i.op in WRITES
    for name in CALLED.findall(i.rest):
        body = module.get(name, {})
        if not all(_written(root, body, pages, module) for root in body.values() if root.root):
            return False
    return True


def _written(i: Instruction, body: dict[str, Instruction], pages: set[int], module: Module) -> bool:
    """The same of the value at a fusion's end, in the fused computation `body`."""
    if i.op in ("bitcast", "tuple"):
        ends = [body[name] for name in i.operands if name in body]
        return all(_written(end, body, pages, module) for end in ends if pages.intersection(end.sizes))
    return _in_place(i, pages, module)


def _sizes(arrays: Any) -> set[int]:
    """Elements of every large array, whole and of one shard."""
    large = [x for x in jax.tree.leaves(arrays) if _shard_size(x) * x.dtype.itemsize >= LARGE]
    return {math.prod(x.shape) for x in large} | {_shard_size(x) for x in large}


def _shard_size(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape))
