"""The processor, as Linux describes it."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

DESCRIPTION: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """A processor and the part of it that this process may use."""

    name: str
    flags: frozenset[str]  # its instruction sets, among others
    cores: int  # that this process may run on

    @property
    def has_amx(self) -> bool:
        """Return whether it has the matrix unit with which XLA multiplies bfloat16 and int8."""
        return "amx_tile" in self.flags


@cache
def processor() -> Processor:
    """Describe the processor; where the system does not, it has no name and no flags."""
    try:
        lines = DESCRIPTION.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())  # all processors are of one kind
    model = " ".join(
        fields.get(name, "") for name in ("model name", "cpu family", "model", "stepping")
    )
    return Processor(model, frozenset(fields.get("flags", "").split()), usable_cores())


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
