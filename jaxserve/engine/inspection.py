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
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]\S* .*?([a-z][\w\-]*)\(")
HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
CALLED = re.compile(r"calls=%?([\w.\-]+)")
MOVES = {"copy", "copy-start", "transpose", "all-gather", "all-gather-start"}
NEAR = re.compile(r"S\([13]\)")  # in a layout: a TPU core's VMEM, a v4's CMEM
SHIFTS = MOVES | {
    "parameter",
    "constant",
    "bitcast",
    "reshape",
    "convert",
    "fusion",
}  # all that a fused copy consists of
WRITES = {"scatter", "dynamic-update-slice"}  # in place, where the result is an aliased argument
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}


@dataclass(frozen=True)
class Inspection:
    """Bytes are of one device. kernels counts instructions that run, those of a loop's body once."""

    arguments: int
    temporaries: int
    aliased: int  # of the arguments, what is updated in place
    fresh: int  # results that are no argument: the download
    copies: tuple[str, ...]  # instructions that make a second copy of a weight or of a layer's pages
    collectives: dict[str, int]
    kernels: int


@dataclass(frozen=True)
class _Instruction:
    name: str
    elements: int
    op: str
    line: str


def inspect(compiled: jax.stages.Compiled, lowering: Lowering) -> Inspection:
    """Of a step of `lowering`; ConfigError where a compiler gives no figures."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError("the compiler reports no memory figures for this device")
    computations = dict(_computations(compiled.as_text() or ""))
    called = {match for body in computations.values() for i in body for match in CALLED.findall(i.line)}
    running = [i for name, body in computations.items() if name not in called for i in body if i.op not in SILENT]
    weights, pages = _sizes(lowering.params), _sizes(lowering.state.pages)
    copies = [i.name for i in running if _copies(i, weights, pages, computations)]
    ops = Counter(i.op.removesuffix("-start") for body in computations.values() for i in body)
    return Inspection(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        fresh=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        copies=tuple(copies),
        collectives={op: ops[op] for op in COLLECTIVES if ops[op]},
        kernels=sum(not i.op.endswith("-done") for i in running),
    )


def _computations(text: str) -> Iterator[tuple[str, list[_Instruction]]]:
    """The HLO module's computations by name, fused ones among them."""
    name, body = "", list[_Instruction]()
    for line in text.splitlines():
        if header := HEADER.match(line):
            name, body = header[1], []
            yield name, body
        elif name and (found := INSTRUCTION.match(line)):
            elements = math.prod(int(n) for n in found[2].split(",") if n)
            body.append(_Instruction(found[1], elements, found[3], line))


def _sizes(arrays: Any) -> set[int]:
    """Elements of every large array, whole and of one shard."""
    large = [x for x in jax.tree.leaves(arrays) if _shard(x) * x.dtype.itemsize >= LARGE]
    return {math.prod(x.shape) for x in large} | {_shard(x) for x in large}


def _shard(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape))


def _copies(i: _Instruction, weights: set[int], pages: set[int], computations: dict[str, list[_Instruction]]) -> bool:
    """Whether an instruction makes a second copy of a weight or of pages: not a trip to a TPU core's own memory.

    Known by the number of elements. Activations may have as many as a weight, so what computes is no copy of one; but
    whatever makes an array of the pages' size without writing in place is one of pages, if it is only by a select.
    """
    result = i.line.partition(f" {i.op}(")[0]
    if i.elements not in weights | pages or (i.op in ("copy", "copy-start") and NEAR.search(result)):
        return False
    if i.op != "fusion":
        return i.op in MOVES
    ops = set(_inside(i, computations))
    return not ops & WRITES if i.elements in pages else ops <= SHIFTS


def _inside(i: _Instruction, computations: dict[str, list[_Instruction]]) -> Iterator[str]:
    """What a fusion is made of; fusions may lie in fusions."""
    for name in CALLED.findall(i.line):
        for inner in computations.get(name, ()):
            yield inner.op
            yield from _inside(inner, computations)
