"""Which library is loaded, and what is said where none can be."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.cpu_kernels import library
from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.errors import JaxserveError


def with_libraries(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "newest", "expected"),
    [
        (("libcpu_kernels.so.3",), 3, "libcpu_kernels.so.3"),
        (("libcpu_kernels.so.3", "libcpu_kernels.so.5"), 5, "libcpu_kernels.so.5"),
        (("libcpu_kernels.so.3", "libcpu_kernels.so.5"), 4, "libcpu_kernels.so.3"),
        (("libcpu_kernels.so.9", "libcpu_kernels.so.10"), 11, "libcpu_kernels.so.10"),
        (("libcpu_kernels.so.3", "libcpu_kernels.so.4.17"), 5, "libcpu_kernels.so.3"),
    ],
)
def test_the_latest_library_that_this_jaxlib_takes(
    tmp_path: Path, names: tuple[str, ...], newest: int, expected: str
) -> None:
    folder = with_libraries(tmp_path, *names)
    assert library.find_library(folder, newest).name == expected


def test_without_a_library(tmp_path: Path) -> None:
    with pytest.raises(CpuKernelError, match=r"not built .* install it again .* C\+\+ compiler"):
        library.find_library(tmp_path, 5)


def test_a_library_for_a_newer_jaxlib(tmp_path: Path) -> None:
    folder = with_libraries(tmp_path, "libcpu_kernels.so.6", "libcpu_kernels.so.7")
    with pytest.raises(CpuKernelError, match=r"for version 0\.6 .* this jaxlib has 0\.5; install"):
        library.find_library(folder, 5)


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libcpu_kernels.so.5"
    path.write_text("not a library")
    with pytest.raises(CpuKernelError, match=r"cannot be loaded .*; install") as error:
        library.open_library(path)
    assert len(str(error.value).splitlines()) == 1


def test_a_library_of_another_version(tmp_path: Path) -> None:
    """Any library of the system is one without our products."""
    path = tmp_path / "libcpu_kernels.so.5"
    path.symlink_to(_path_of_libm())
    with pytest.raises(CpuKernelError, match=r"it has no jaxserve_instructions; install"):
        library.open_library(path)


def _path_of_libm() -> str:
    """Return where the process has the library of mathematics."""
    maps = Path("/proc/self/maps").read_text().split()
    return next(word for word in maps if "/libm.so" in word or "/libm-" in word)


def test_a_processor_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(jaxserve_instructions=lambda: b"")
    monkeypatch.setattr(library, "find_library", lambda folder, newest: Path("products.so"))
    monkeypatch.setattr(library, "open_library", lambda path: opened)
    with pytest.raises(CpuKernelError, match="they need AVX2 and FMA"):
        library.load.__wrapped__()


def test_headers_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CpuKernelError, match="cannot be read; reinstall jaxlib"):
        library.ffi_minor(tmp_path)


def test_headers_without_a_version(tmp_path: Path) -> None:
    header = tmp_path / library.HEADER
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n")
    with pytest.raises(CpuKernelError, match="defines no XLA_FFI_API_MINOR; reinstall jaxlib"):
        library.ffi_minor(tmp_path)


def test_the_running_jaxlib_says_its_version() -> None:
    assert library.ffi_minor(Path(jax.ffi.include_dir())) > 0


def loaded_library() -> ctypes.CDLL:
    """Load the real library, or skip with the reason why there is none."""
    try:
        library.load()
    except CpuKernelError as error:
        pytest.skip(str(error))
    newest = library.ffi_minor(Path(jax.ffi.include_dir()))
    return library.open_library(library.find_library(library.FOLDER, newest))


def test_the_name_of_the_library_has_the_version_that_it_was_built_for() -> None:
    loaded: Any = loaded_library()
    assert Path(loaded._name).name == f"libcpu_kernels.so.{loaded.jaxserve_ffi_minor()}"


def test_the_library_is_loaded_once() -> None:
    loaded_library()
    assert library.load() is library.load()
    assert library.supported()[0] == library.load().instructions


def test_the_error_is_one_of_jaxserve() -> None:
    assert issubclass(CpuKernelError, JaxserveError)
