"""The text of a compiled HLO module, read into computations and their instructions."""

import math
import re
from dataclasses import dataclass

HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)"
)  # root, name, type, op, the rest
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
ARRAY = r"\w+\[[\d,]*\](?:\{[^}]*\})?"
OPERANDS_OF_A_START = re.compile(r"^\(\(.*?\), (?=\w+\[|\()")
OPERAND_OF_AN_EXCHANGE = re.compile(
    rf"^\({ARRAY}, (?=\w+\[)"
)  # of one that is started with a lone operand
WITH_OPERAND = {"all-gather-start", "reduce-scatter-start", "collective-permute-start"}
CALLED = re.compile(r"calls=%?([\w.\-]+)")
# Those that make no array of their own; of a custom call nobody can tell, and its temporaries are
# counted anyway.
SILENT = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "optimization-barrier",
    "after-all",
}
CALLS = {"while", "conditional", "call", "custom-call"}


@dataclass(frozen=True)
class Instruction:
    """op: without the suffix of an asynchronous one. sizes: elements of each array of the
    result."""

    name: str
    op: str
    result: str
    rest: str
    root: bool
    done: bool

    @property
    def sizes(self) -> list[int]:
        return [_elements(dims) for _, dims in SHAPE.findall(self.result)]

    @property
    def nbytes(self) -> int:
        """Of all arrays of the result."""
        return sum(
            _elements(dims) * _bits(dtype) // 8 for dtype, dims in SHAPE.findall(self.result)
        )

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def runs(self) -> bool:
        return self.op not in SILENT | CALLS and not self.done


Body = dict[str, Instruction]  # a computation's instructions by name
Module = dict[str, Body]  # computations by name


def parse(text: str) -> Module:
    """The text of a compiled HLO module."""
    module: Module = {}
    body: Body = {}
    for line in text.splitlines():
        if header := HEADER.match(line):
            body = module[header[1]] = {}
        elif found := INSTRUCTION.match(line):
            root, name, result, op, rest = found.groups()
            plain = re.sub("-(start|update|done)$", "", op)
            if op.endswith("-start"):
                result = OPERANDS_OF_A_START.sub("(", result)
            if op in WITH_OPERAND:
                result = OPERAND_OF_AN_EXCHANGE.sub("(", result)
            done = (
                op.endswith(("-done", "-update")) and plain != "dynamic"
            )  # dynamic-update-slice ends otherwise
            body[name] = Instruction(name, plain, result, rest, bool(root), done)
    return module


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def _bits(dtype: str) -> int:
    """bf16 -> 16, f8e4m3fn -> 8, pred -> 8."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
