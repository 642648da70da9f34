"""Compiles the kernels for a CPU when a wheel is built, or an editable installation.

Where that cannot be, the package is installed without them, and says why. A compiler that refuses
the sources is an error.
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("jaxserve/cpu_kernels")  # below the root
SOURCES = ("products.cc", "attention.cc")
COMPILERS = ("g++", "clang++")
# No -march: the sources choose their instructions function by function, and ask the processor when
# they run. Nobody reads floating-point exceptions or errno, and loops that keep them do not become
# vectors. Assertions in XLA's headers would put the headers' path into the library (-DNDEBUG). -w:
# compilers warn of the vector types in their own headers.
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-w"),
    *("-fno-trapping-math", "-fno-math-errno"),
)


# Instructions that compilers have had for the least time: GCC from 10 on, clang from 9 on.
PROBE = """
#include <immintrin.h>
__attribute__((target("avx512f,avx512bf16,avx512vnni")))
__m512 probe(__m512 sum, __m512bh x, __m512bh y) { return _mm512_dpbf16_ps(sum, x, y); }
"""


class SkippedError(Exception):
    """The kernels cannot be built here; the text is the reason."""


class CustomBuildHook(BuildHookInterface):
    """Puts the compiled library beside its sources and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            library = build(Path(self.root))
        except SkippedError as reason:
            self.app.display_warning(
                f"jaxserve is built without its kernels for a CPU: {reason}. "
                "Products and attention on a CPU are XLA's then."
            )
            return
        build_data["artifacts"].append("/" + library.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = wheel_tag()


def build(root: Path) -> Path:
    """Compile the library into the source tree and return its path."""
    check_platform()
    headers = find_headers()
    compiler = find_compiler()
    check_compiler(compiler)
    if not os.access(root / FOLDER, os.W_OK):
        raise SkippedError(f"{root / FOLDER} cannot be written")
    library = root / FOLDER / f"libcpu_kernels.so.{ffi_minor(headers)}"
    compile_library(compiler, headers, [root / FOLDER / name for name in SOURCES], library)
    return library


def check_platform() -> None:
    """Raise SkippedError except on Linux on x86-64, the only place that the kernels are for."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SkippedError(
            f"they are for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
        )


def find_headers() -> Path:
    """Return the folder of XLA's headers, which jaxlib has, without importing it."""
    found = importlib.util.find_spec("jaxlib")
    for folder in found.submodule_search_locations or () if found else ():
        headers = Path(folder) / "include"
        if (headers / "xla/ffi/api/ffi.h").exists():
            return headers
    raise SkippedError("there is no jaxlib with XLA's headers")


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: $CXX, or the first of COMPILERS that there is."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    missing = f"$CXX names {asked[0]}" if asked else f"tried {' and '.join(COMPILERS)}"
    raise SkippedError(f"there is no C++ compiler ({missing})")


def check_compiler(command: list[str]) -> None:
    """Raise SkippedError where a compiler does not know the instructions of the kernels."""
    compiles = [*command, "-x", "c++", "-std=c++17", "-c", "-", "-o", os.devnull]
    if subprocess.run(compiles, input=PROBE, capture_output=True, text=True).returncode:
        raise SkippedError(
            f"{command[0]} does not compile AVX-512 with bfloat16 (GCC 10 and clang 9 do)"
        )


def ffi_minor(headers: Path) -> int:
    """Return the minor version of XLA's foreign function interface; any later one takes it."""
    text = (headers / "xla/ffi/api/c_api.h").read_text()
    found = re.search(r"^#define XLA_FFI_API_MINOR (\d+)$", text, re.MULTILINE)
    if not found:
        raise SkippedError(f"the headers in {headers} do not say of which version they are")
    return int(found[1])


def compile_library(compiler: list[str], headers: Path, sources: list[Path], library: Path) -> None:
    """Compile the sources beside each other, and link them.

    The library comes to its place at once: another process may be loading it.
    """
    with TemporaryDirectory(prefix="unfinished-", dir=library.parent) as folder:
        objects = [Path(folder, source.name).with_suffix(".o") for source in sources]
        unfinished = Path(folder, library.name)

        def compile_one(source: Path, to: Path) -> None:
            run([*compiler, *FLAGS, "-isystem", headers, "-c", source, "-o", to])

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(compile_one, sources, objects))
        run([*compiler, "-shared", *objects, "-o", unfinished])
        os.replace(unfinished, library)


def run(command: list[str | Path]) -> None:
    """Run a compiler; RuntimeError with all that it says where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shown = " ".join(map(str, command))
        raise RuntimeError(
            f"{shown}\nended with {done.returncode}:\n{done.stderr}\n"
            "HATCH_BUILD_NO_HOOKS=true installs jaxserve without its kernels for a CPU"
        )


def wheel_tag() -> str:
    """Return the wheel's tag: no Python of its own, for this kind of machine alone."""
    return "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())
