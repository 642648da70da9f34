"""What a compiled step sends between devices: its collectives, as often as they run, and the bytes
of each.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from jaxserve.plan.hlo.parser import Instruction, Module

# Computations that an instruction runs, by whatever name it calls them.
CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch|called)_computations?)"
    r"=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)"
)
LOOP = re.compile(r"condition=%([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Groups of devices: {{0,1},{2,3}} | [2,8]<=[16], as many as the second number |
# mesh['a'=2,'b'=8] {'b'}, along axes.
LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")
MESH = re.compile(r"replica_groups=(?:@\w+|mesh)\[([^\]]*)\] \{([^}]*)\}")

# Bytes that each of n devices sends in a ring, of a result of so many bytes (Patarasuk and Yuan,
# 2009).
COLLECTIVES: Final[Mapping[str, Callable[[int, int], float]]] = MappingProxyType(
    {
        "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
        "all-gather": lambda size, n: size * (n - 1) / n,
        "reduce-scatter": lambda size, n: size * (n - 1),
        "all-to-all": lambda size, n: size * (n - 1) / n,
        "ragged-all-to-all": lambda size, n: size * (n - 1) / n,
        "collective-permute": lambda size, n: size,
    }
)


def bytes_sent(module: Module, devices: int) -> dict[str, int]:
    """Bytes that one device sends in a launch, by collective; of a conditional, in all of its
    branches.
    """
    sent: Counter[str] = Counter()
    runs = _runs(module)
    for name, body in module.items():
        for i in body.values():
            if i.op in COLLECTIVES and not i.done:
                sent[i.op] += round(
                    runs[name] * COLLECTIVES[i.op](i.nbytes, group_size(i, devices))
                )
    return dict(sent)


def group_size(collective: Instruction, devices: int) -> int:
    """How many devices take part together; `devices` where it names no groups."""
    if found := LISTED.search(collective.rest):
        return len(found[1].split(","))
    if found := COUNTED.search(collective.rest):
        return int(found[1])
    if found := MESH.search(collective.rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        axes = re.findall(
            r"'([^']+)'(?::\(\d+\)(\d+))?", found[2]
        )  # 'b', or a part of it: 'b':(1)4
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def _runs(module: Module) -> Counter[str]:
    """How often each computation runs in a launch. In a module's text, whoever calls comes after
    what is called.
    """
    runs: Counter[str] = Counter()
    callees = {
        name: [(i, callee) for i in body.values() for callee in _callees(i)]
        for name, body in module.items()
    }
    called = {callee for calls in callees.values() for _, callee in calls}
    for name in reversed(module):
        if name not in called:
            runs[name] = 1
        for i, callee in callees[name]:
            runs[callee] += runs[name] * (_trips(i, module) if i.op == "while" else 1)
    return runs


def _callees(i: Instruction) -> list[str]:
    where, _, _ = i.rest.partition(", metadata=")  # the compiler's notes on a kernel are long
    return [
        name.removeprefix("%") for names in CALLEES.findall(where) for name in names.split(", ")
    ]


def _trips(loop: Instruction, module: Module) -> int:
    """Of a loop that counts up from 0: as the compiler says, or the lone constant of its condition;
    else 1.
    """
    if found := TRIPS.search(loop.rest):
        return int(found[1])
    condition = LOOP.search(loop.rest)
    body = module.get(condition[1], {}) if condition else {}
    constants = [
        i.rest.partition(")")[0]
        for i in body.values()
        if i.op == "constant" and i.result.startswith("s32[]")
    ]
    return int(constants[0]) if len(constants) == 1 else 1
