"""The library of kernels that was compiled with the package: its file, and how XLA knows it.

Its name has the minor version of the foreign function interface that it was compiled for,
`libcpu_kernels.so.5`: a jaxlib takes libraries of its own version and of earlier ones.
"""

import ctypes
import logging
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from platform import machine
from typing import Final

import jax

from jaxserve.cpu_kernels.errors import CpuKernelError

FOLDER: Final = Path(__file__).parent
HEADER: Final = Path("xla/ffi/api/c_api.h")  # below the folder of jaxlib's headers
INSTRUCTIONS: Final = (
    "avx512",
    "avx2",
)  # the best first; each processor with one has all behind it
NUMBERS: Final = ("bfloat16", "float32", "int8")


@dataclass(frozen=True)
class Library:
    """The loaded library, whose kernels XLA knows.

    Attributes:
        instructions: Best of INSTRUCTIONS that the processor has.
    """

    instructions: str


def target_name(numbers: str, instructions: str) -> str:
    """Return the name by which XLA and the library know a product."""
    return f"jaxserve_product_{numbers}_{instructions}"


def attention_target(instructions: str) -> str:
    """Return the name by which XLA and the library know attention."""
    return f"jaxserve_attention_{instructions}"


@cache
def load() -> Library:
    """Load the library and make its kernels known to XLA; CpuKernelError if that cannot be."""
    path = find_library(FOLDER, ffi_minor(Path(jax.ffi.include_dir())))
    loaded = open_library(path)
    instructions = best_instructions(loaded)
    if instructions not in INSTRUCTIONS:
        raise CpuKernelError(
            "this processor has no instructions that the kernels for a CPU are compiled for; "
            "they need AVX2 and FMA"
        )
    register(loaded)
    return Library(instructions)


def supported() -> tuple[str, ...]:
    """Return the INSTRUCTIONS that the processor has, the best first."""
    return INSTRUCTIONS[INSTRUCTIONS.index(load().instructions) :]


def instructions_here() -> str | None:
    """Return the best instructions that the kernels have here; None where no kernel runs."""
    try:
        return load().instructions
    except CpuKernelError:
        return None


def missing_level() -> int:
    """Return the level at which a log says that there is no library; only x86-64 has one."""
    return logging.WARNING if machine() == "x86_64" else logging.INFO


def check_instructions(instructions: str) -> None:
    """Raise ValueError for instructions that the processor does not have."""
    if instructions not in supported():
        raise ValueError(
            f"instructions is {instructions!r}; this processor has {', '.join(supported())}"
        )


def ffi_minor(headers: Path) -> int:
    """Return the minor version of the foreign function interface that these headers describe."""
    try:
        text = (headers / HEADER).read_text()
    except OSError as error:
        raise CpuKernelError(f"{headers / HEADER} cannot be read; reinstall jaxlib") from error
    found = re.search(r"^#define XLA_FFI_API_MINOR (\d+)$", text, re.MULTILINE)
    if not found:
        raise CpuKernelError(f"{headers / HEADER} defines no XLA_FFI_API_MINOR; reinstall jaxlib")
    return int(found[1])


def find_library(folder: Path, newest: int) -> Path:
    """Return the library of the latest version that is `newest` or earlier."""
    built = {
        int(found[1]): path
        for path in folder.glob("libcpu_kernels.so.*")
        if (found := re.fullmatch(r"libcpu_kernels\.so\.(\d+)", path.name))
    }
    if not built:
        raise CpuKernelError(
            "the kernels for a CPU were not built when jaxserve was installed; "
            "install it again on Linux on x86-64 where there is a C++ compiler (g++ or clang++)"
        )
    usable = [minor for minor in built if minor <= newest]
    if not usable:
        raise CpuKernelError(
            f"the kernels for a CPU were built for version 0.{min(built)} of XLA's foreign "
            f"function interface, and this jaxlib has 0.{newest}; install jaxserve again "
            "with this jaxlib, or a newer jaxlib"
        )
    return built[max(usable)]


def open_library(path: Path) -> ctypes.CDLL:
    """Open a library; CpuKernelError where the system's loader refuses, or a kernel is missing."""
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        text = " ".join(str(error).split())
        raise CpuKernelError(
            f"the kernels for a CPU cannot be loaded ({text}); install jaxserve again here"
        ) from error
    missing = [name for name in _symbols() if not hasattr(loaded, name)]
    if missing:
        raise CpuKernelError(
            f"{path} is of another version of jaxserve: it has no {missing[0]}; "
            "install jaxserve again"
        )
    return loaded


def _symbols() -> list[str]:
    """Return the names that the library has to have."""
    return ["jaxserve_instructions", *_targets()]


def _targets() -> list[str]:
    """Return the names of all kernels."""
    products = [target_name(numbers, each) for each in INSTRUCTIONS for numbers in NUMBERS]
    return [*products, *map(attention_target, INSTRUCTIONS)]


def best_instructions(loaded: ctypes.CDLL) -> str:
    """Return the best instructions that the library finds in the processor; "" for none."""
    ask = loaded.jaxserve_instructions
    ask.restype = ctypes.c_char_p
    return ask().decode()


def register(loaded: ctypes.CDLL) -> None:
    """Make the kernels known to XLA by their names."""
    for name in _targets():
        capsule = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
