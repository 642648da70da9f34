"""Environment of a measurement: software, machine and load, without which figures mean nothing."""

import os
import platform
import time
from typing import Any

from jaxserve.doctor.machine import installed_version, usable_cores

PACKAGES = ("jaxserve", "jax", "jaxlib")
IDLE = 0.4  # load average of the last minute; above it other programs compute too


def versions() -> dict[str, str]:
    """Return the versions of jaxserve and jax, and the date."""
    # A copy that was not installed has no version.
    found = {name: installed_version(name) or "unknown" for name in PACKAGES}
    return found | {"date": time.strftime("%Y-%m-%d")}


def environment(command_line: str) -> dict[str, Any]:
    """Return versions, the command and facts about this machine.

    Call it before measuring, because the measurement adds to the load average of the last minute.
    """
    machine = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": usable_cores(),
        "load_before": round(os.getloadavg()[0], 2),
    }
    return versions() | {"command": command_line} | machine


def footnote(found: dict[str, Any], device: str) -> str:
    """Return the line below a table: device, versions, date and the load before."""
    load = f"load {found['load_before']} on {found['cores']} cores before"
    if found["load_before"] > IDLE:
        load += ": NOT IDLE, others used this machine too"
    names = ", ".join(f"{name} {found[name]}" for name in PACKAGES[:2])
    return f"{device}, {names}, python {found['python']}, {found['date']}, {load}"
