"""Where and with what something was measured: a figure without that means nothing."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("jaxserve", "jax", "jaxlib")
IDLE = 0.4  # load of the last minute; above it somebody else computes too


def versions() -> dict[str, str]:
    """Of our software and of jax, and the date."""
    return {name: _version(name) for name in PACKAGES} | {"date": time.strftime("%Y-%m-%d")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a copy that was not installed
        return "unknown"


def environment(command_line: str) -> dict[str, Any]:
    """`versions`, the command and this machine: cores that may be used, and the load average of the
    last minute.

    Ask before measuring: what is measured is load too.
    """
    machine = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
    }
    return versions() | {"command": command_line} | machine


def footnote(found: dict[str, Any], device: str) -> str:
    """One line below a table: device, versions, date, and whether others used the machine."""
    busy = found["load_before"] > IDLE
    load = f"load {found['load_before']} on {found['cores']} cores before" + (
        ": NOT IDLE, others used this machine too" if busy else ""
    )
    names = ", ".join(f"{name} {found[name]}" for name in PACKAGES[:2])
    return f"{device}, {names}, python {found['python']}, {found['date']}, {load}"
