"""Platform of the planner's process: always the CPU, so that jax looks for no TPU or GPU."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.cpu_kernels.library import instructions_here
from jaxserve.plan.topology import Topology
from jaxserve.sharding.aot_devices import ENVIRONMENT

PACKAGES = ("jaxserve", "jax", "jaxlib")
# Flags that are no part of the keys of jax's cache.
UNHASHED = ("--xla_dump", "--xla_force_host_platform_device_count")


def prepare_platform(topology: Topology) -> None:
    """Set up jax for a plan, before jax is first used."""
    os.environ.update(ENVIRONMENT)  # libtpu reads its settings from there
    jax.config.update("jax_platforms", "cpu")
    _use_cache(False)  # jax cannot read back what was compiled for absent devices
    if topology.chip is None:
        jax.config.update("jax_num_cpu_devices", topology.count)


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """Keep what is compiled in this block in a folder."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _use_cache(True)
    try:
        yield
    finally:
        _use_cache(False)


def _use_cache(use: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", use)
    compilation_cache.reset_cache()  # jax decides only once, unless it is reset


def environment(platform: str) -> dict[str, Any]:
    """Return the versions, flags and instructions that keys of jax's cache depend on."""
    flags = [
        flag
        for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
        for flag in os.environ.get(name, "").split()
    ]
    zstd = sys.version_info >= (3, 14) or importlib.util.find_spec("zstandard") is not None
    return {
        **{package: version(package) for package in PACKAGES},
        "libtpu": _version("libtpu") if platform == "tpu" else None,
        "cpu_kernels": instructions_here() if platform == "cpu" else None,
        "flags": sorted(flag for flag in flags if not flag.startswith(UNHASHED)),
        "compression": "zstd" if zstd else "zlib",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
