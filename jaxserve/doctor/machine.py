"""Facts of a machine and an installation that can be seen without jax."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxserve.cache_folders import default_compilation_cache, folder_problem

GIB = 2**30
LEAST_DISK = 2 * GIB  # compiled steps of a large model take some hundred MB, a small model one GB
CUDA_PLUGIN = "jax-cuda13-plugin"
PACKAGES = (
    "jaxserve",
    "jax",
    "jaxlib",
    "libtpu",
    CUDA_PLUGIN,
    "orbax-checkpoint",
    "grpcio",
    "huggingface-hub",
)
INSTALL_AGAIN = "install jaxserve again, into a new environment: a package that it needs is damaged"
CUDA_DRIVER = 580  # the first that runs CUDA 13
GOOGLE = "0x1ae0"  # PCI vendor of TPUs, and of network and disk adapters of Google's machines
# PCI devices that are TPUs, v3 to 8t, as jax looks for them.
TPUS = (
    *("0x0027", "0x0056", "0x005e", "0x0062", "0x0063"),
    *("0x006f", "0x0076", "0x0083", "0x007c"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    fault: str = ""  # what is wrong, and what to do about it; empty where nothing is wrong


def packages() -> Iterator[Finding]:
    """Yield the versions of Python and of the packages that are installed."""
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    for package in PACKAGES:
        if found := installed_version(package):
            yield Finding(package, found)


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield processors, memory and NVIDIA's driver, as files below `root` describe them."""
    yield Finding("processors", str(usable_cores()))
    meminfo = _text(root / "proc" / "meminfo")
    kibibytes = dict(re.findall(r"^(\w+): +(\d+) kB$", meminfo, re.MULTILINE))
    if kibibytes:
        available, total = (int(kibibytes[key]) * 1024 for key in ("MemAvailable", "MemTotal"))
        yield Finding("memory", f"{available / GIB:.1f} of {total / GIB:.1f} GiB available")
    if driver := nvidia_driver(root):
        yield Finding("NVIDIA driver", driver, _driver_fault(driver))


def _driver_fault(driver: str) -> str:
    """Return what is wrong with the driver; empty where the installed plugin can use it."""
    is_old = int(driver.split(".")[0]) < CUDA_DRIVER
    if not is_old or installed_version(CUDA_PLUGIN) is None:
        return ""
    return f"{CUDA_PLUGIN} needs driver {CUDA_DRIVER} or newer: update the driver"


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def nvidia_driver(root: Path) -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    described = _text(root / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.[.\d]+)", described)
    return found[1] if found else None


def has_tpu(root: Path) -> bool:
    """Return whether a TPU is plugged in."""
    folders = (root / "sys" / "bus" / "pci" / "devices").glob("*")
    return any(
        _text(folder / "vendor").strip() == GOOGLE and _text(folder / "device").strip() in TPUS
        for folder in folders
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def folders() -> Iterator[Finding]:
    """Yield the folder of compiled steps, its size, and what the disk has left.

    The folder is made, as the programs do.
    """
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named and "://" in named:
        yield Finding("compiled steps", f"{named}, which is not looked at")
        return
    folder = Path(named) if named else default_compilation_cache()
    problem = folder_problem(folder)
    if problem or folder is None:
        variable = "JAX_COMPILATION_CACHE_DIR" if named else "XDG_CACHE_HOME"
        fault = f"{problem}: every start compiles anew; set {variable} to a folder of yours"
        yield Finding("compiled steps", str(folder or "~"), fault)
        return
    yield Finding("compiled steps", f"{folder}, {_size(folder) / 1e6:,.0f} MB")
    free = shutil.disk_usage(folder).free
    fault = "" if free >= LEAST_DISK else "compiled steps may not fit: free some space"
    yield Finding("disk", f"{free / GIB:.1f} GiB free for compiled steps", fault)


def hub_folder() -> Iterator[Finding]:
    """Yield the folder that models of the hub are fetched into, its size, and what its disk has.

    The folder is made, as fetching does; with HF_HUB_OFFLINE nothing is fetched, and none is made.
    """
    name = "models of the hub"
    try:
        from huggingface_hub import constants
    except ImportError as error:
        yield Finding(name, f"cannot be fetched: {error}", INSTALL_AGAIN)
        return
    folder = Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        yield Finding(name, f"{folder}, {_gigabytes(folder)}, and HF_HUB_OFFLINE: none is fetched")
        return
    if problem := folder_problem(folder):
        fault = f"{problem}: no model can be fetched; set HF_HOME to a folder of yours"
        yield Finding(name, str(folder), fault)
        return
    yield Finding(name, f"{folder}, {_gigabytes(folder)}")
    free = shutil.disk_usage(folder).free
    fault = "" if free >= LEAST_DISK else "a model may not fit: free some space, or set HF_HOME"
    yield Finding("disk of models", f"{free / GIB:.1f} GiB free", fault)


def _gigabytes(folder: Path) -> str:
    return f"{_size(folder) / 1e9:,.1f} GB"


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder, from which other processes may remove some.

    Links count nothing: in the hub's cache they name files of the same folder.
    """
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return size
