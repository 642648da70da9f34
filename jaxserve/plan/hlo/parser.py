"""Parser of a compiled HLO module's text into computations and their instructions."""

import math
import re
from dataclasses import dataclass

HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# Groups: root, name, type of the result, operation, operands and attributes.
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
ARRAY = r"\w+\[[\d,]*\](?:\{[^}]*\})?"
# The result of an asynchronous "-start" begins with its operands, which are no results: a tuple
# of several, or a lone one for some collectives.
OPERANDS_OF_A_START = re.compile(r"^\(\(.*?\), (?=\w+\[|\()")
OPERAND_OF_A_START = re.compile(rf"^\({ARRAY}, (?=\w+\[)")
WITH_LONE_OPERAND = {"all-gather-start", "reduce-scatter-start", "collective-permute-start"}
CALLED = re.compile(r"calls=%?([\w.\-]+)")
# Operations that make no array of their own.
WITHOUT_ARRAY = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    *("optimization-barrier", "after-all"),
}
# Operations whose arrays are made by what they call. What a custom call makes cannot be told, and
# the compiler counts its temporaries anyway.
CALLS = {"while", "conditional", "call", "custom-call"}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    op: str  # without the suffix of an asynchronous one
    result: str  # its type, as the text has it
    rest: str  # operands and attributes, as the text has them
    root: bool  # True for the result of its computation
    done: bool  # True for the end or an update of an asynchronous operation

    @property
    def sizes(self) -> list[int]:
        """Numbers of elements, one for each array of the result."""
        return [elements(dims) for _, dims in SHAPE.findall(self.result)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the result."""
        return sum(elements(dims) * _bits(dtype) // 8 for dtype, dims in SHAPE.findall(self.result))

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def makes_arrays(self) -> bool:
        """True for an operation that runs by itself and writes arrays of its own."""
        return self.op not in WITHOUT_ARRAY | CALLS and not self.done


Body = dict[str, Instruction]  # a computation's instructions by name
Module = dict[str, Body]  # computations by name


def parse(text: str) -> Module:
    """Parse the text of a compiled HLO module."""
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
            if op in WITH_LONE_OPERAND:
                result = OPERAND_OF_A_START.sub("(", result)
            done = op.endswith(("-done", "-update"))
            body[name] = Instruction(name, plain, result, rest, bool(root), done)
    return module


def elements(dims: str) -> int:
    """Return the number of elements of an array with these dimensions, such as "2,3"."""
    return math.prod(int(n) for n in dims.split(",") if n)


def _bits(dtype: str) -> int:
    """Read the width of a dtype from its name: bf16 has 16 bits, f8e4m3fn 8, and pred 8."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
