"""Folder of the steps that the tests compile; outside of the checkout, so that new clones share it.

A compiled step fits the jax that compiled it and the processor's instructions, of which jax's own
keys name the former only.
"""

import hashlib
import os
import platform
from pathlib import Path

import jax
import jaxlib

BYTES = 2 * 2**30  # a whole run writes a hundredth of it
CPU_FEATURES = ("flags", "Features")  # lines of /proc/cpuinfo on x86 and on Arm


def compiled_steps_folder() -> Path:
    """Return the folder that JAXSERVE_TEST_CACHE names, or one of this jax and this processor."""
    if chosen := os.environ.get("JAXSERVE_TEST_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    versions = f"jax-{jax.__version__}-jaxlib-{jaxlib.__version__}"
    return Path(base) / "jaxserve" / "tests" / f"{versions}-{processor()}"


def processor() -> str:
    """Return a name for what the processor can do."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = [line for line in lines if line.startswith(CPU_FEATURES)]
    digest = hashlib.sha256(features[0].encode() if features else b"").hexdigest()
    return f"{platform.machine()}-{digest[:12]}"
