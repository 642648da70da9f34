"""Traffic of a compiled step between devices: its collectives, how often they run, their bytes."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from jaxserve.plan.hlo.parser import Instruction, Module

# Computations that an instruction calls, under any of HLO's attributes for them.
CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch|called)_computations?)"
    r"=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)"
)
LOOP = re.compile(r"condition=%([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Groups of devices take three forms: lists {{0,1},{2,3}}; counts [2,8]<=[16], 2 groups of 8; and
# axes of a mesh, mesh['a'=2,'b'=8] {'b'}.
LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")
MESH = re.compile(r"replica_groups=(?:@\w+|mesh)\[([^\]]*)\] \{([^}]*)\}")

# Bytes that each of n devices sends in a ring, by the bytes of the result (Patarasuk, Yuan 2009).
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
    """Return the bytes that one device of a mesh of `devices` sends in a launch, by collective.

    All branches of a conditional count.
    """
    sent: Counter[str] = Counter()
    runs = _runs(module)
    for name, body in module.items():
        for i in body.values():
            if i.op in COLLECTIVES and not i.done:
                once = COLLECTIVES[i.op](i.nbytes, group_size(i, devices))
                sent[i.op] += round(runs[name] * once)
    return dict(sent)


def group_size(collective: Instruction, devices: int) -> int:
    """Return how many devices exchange with each other; `devices` where no groups are named."""
    if found := LISTED.search(collective.rest):
        return len(found[1].split(","))
    if found := COUNTED.search(collective.rest):
        return int(found[1])
    if found := MESH.search(collective.rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        # An axis is named as 'b', a part of it as 'b':(1)4.
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def _runs(module: Module) -> Counter[str]:
    """Count how often each computation runs in a launch."""
    runs: Counter[str] = Counter()
    callees = {
        name: [(i, callee) for i in body.values() for callee in _callees(i)]
        for name, body in module.items()
    }
    called = {callee for calls in callees.values() for _, callee in calls}
    # A module's text has callers behind what they call: in reverse, each comes before its callees.
    for name in reversed(module):
        if name not in called:
            runs[name] = 1
        for i, callee in callees[name]:
            trips = _trips(i, module) if i.op == "while" else 1
            runs[callee] += runs[name] * trips
    return runs


def _callees(i: Instruction) -> list[str]:
    # Metadata is cut off: the compiler's notes on a kernel are long, and may look like calls.
    attributes, _, _ = i.rest.partition(", metadata=")
    return [
        name.removeprefix("%")
        for names in CALLEES.findall(attributes)
        for name in names.split(", ")
    ]


def _trips(loop: Instruction, module: Module) -> int:
    """Return how often a loop that counts up from 0 runs its body.

    The compiler may say it; otherwise it is the lone constant of the loop's condition. 1 where
    neither is known.
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
