"""Readings of a process from /proc, and how fast each figure grows."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# Growth per minute that is no leak: noise of a fit.
BOUNDS = {
    "rss_kib": 512.0,
    "descriptors": 0.5,
    "threads": 0.2,
    "children": 0.2,
    "children_rss_kib": 512.0,
}


@dataclass
class Samples:
    """Readings of one server's process, one a second.

    Attributes:
        children: Processes that it has started and that still run, such as the one that checks
            grammars.
        children_rss_kib: Memory of all of these.
    """

    seconds: list[float] = field(default_factory=list)
    rss_kib: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)
    children: list[float] = field(default_factory=list)
    children_rss_kib: list[float] = field(default_factory=list)

    def take(self, pid: int, seconds: float) -> None:
        """Read everything once, at so many seconds after the beginning."""
        status = _status(pid)
        children = _children(pid)
        self.seconds.append(seconds)
        self.rss_kib.append(_kib(status))
        self.threads.append(float(status["Threads"]))
        self.descriptors.append(float(len(os.listdir(f"/proc/{pid}/fd"))))
        self.children.append(float(len(children)))
        self.children_rss_kib.append(sum(map(_kib, children)))

    def slopes(self) -> dict[str, float]:
        """Return each figure's growth per minute, by least squares, in the second half."""
        first = len(self.seconds) // 2
        minutes = np.array(self.seconds[first:]) / 60
        return {
            name: float(np.polyfit(minutes, getattr(self, name)[first:], 1)[0]) for name in BOUNDS
        }

    def grew(self) -> list[str]:
        """Return the names of the figures that grow by more than their bounds."""
        return [name for name, slope in self.slopes().items() if slope > BOUNDS[name]]


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)


def _kib(status: dict[str, str]) -> float:
    """Return the resident memory; a process that has ended and was not waited for has none."""
    return float(status.get("VmRSS", "0").split()[0])


def _children(pid: int) -> list[dict[str, str]]:
    """Return the status of each child; threads and children may end while they are looked at."""
    found = list[dict[str, str]]()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                with suppress(OSError):
                    found.append(_status(int(child)))
    return found
