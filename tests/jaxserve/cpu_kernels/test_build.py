"""When the build compiles the kernels for a CPU, when it goes on without, and when it fails."""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
INTERFACE = "hatchling.builders.hooks.plugin.interface"
UNKNOWN = "no-such-compiler"
# Work with `sh`, called as a compiler is; the last argument is the file to write. WRITES puts the
# arguments into it, and what is in the objects among them.
WRITES = """
for last; do :; done
echo "$@" >"$last"
for each; do case "$each" in "$last") ;; *.o) cat "$each" >>"$last";; esac; done
"""
FAILS = 'case "$*" in *products.cc*) echo products.cc:7: error: no >&2; exit 3;; esac'
LINK_FAILS = 'case "$*" in *-shared*) echo ld: no such symbol >&2; exit 1;; esac\n' + WRITES
KNOWS_NO_BFLOAT16 = "exit 1"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import hatch_build.py; hatchling is installed where wheels are built, not here."""
    interface = ModuleType(INTERFACE)
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    parts = INTERFACE.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, INTERFACE, interface)
    monkeypatch.delenv("CXX", raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_linux(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only platform that the kernels are for."""
    monkeypatch.setattr(hook.sys, "platform", "linux")
    monkeypatch.setattr(hook.platform, "machine", lambda: "x86_64")


@pytest.fixture
def root(tmp_path: Path, hook: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Source tree with empty sources, and headers of version 0.7."""
    folder = tmp_path / "tree"
    (folder / hook.FOLDER).mkdir(parents=True)
    for name in hook.SOURCES:
        (folder / hook.FOLDER / name).touch()
    api = tmp_path / "headers" / "xla" / "ffi" / "api"
    api.mkdir(parents=True)
    (api / "c_api.h").write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 7\n")
    monkeypatch.setattr(hook, "find_headers", lambda: tmp_path / "headers")
    return folder


def compile_with(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let $CXX be a script."""
    path = folder / "compiler.sh"
    path.write_text(script)
    monkeypatch.setenv("CXX", f"sh {path}")


def initialize(hook: Any, root: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the hook as hatchling does; its build data and warnings."""
    warnings: list[str] = []
    made = hook.CustomBuildHook()
    made.root = str(root)
    made.app = SimpleNamespace(display_warning=warnings.append)
    build_data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    made.initialize("standard", build_data)
    return build_data, warnings


@pytest.mark.usefixtures("on_linux")
def test_a_library_is_built(
    hook: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(WRITES, tmp_path, monkeypatch)
    build_data, warnings = initialize(hook, root)
    folder = root / hook.FOLDER
    link, *compiles = (folder / "libcpu_kernels.so.7").read_text().splitlines()
    assert "-shared" in link.split() and len(compiles) == len(hook.SOURCES)
    for source, command in zip(hook.SOURCES, compiles, strict=True):
        assert str(folder / source) in command and "-isystem" in command.split()
    assert {path.name for path in folder.iterdir()} == {*hook.SOURCES, "libcpu_kernels.so.7"}
    assert build_data["artifacts"] == ["/jaxserve/cpu_kernels/libcpu_kernels.so.7"]
    assert build_data["pure_python"] is False
    assert re.fullmatch(r"py3-none-\w+", build_data["tag"])
    assert not warnings


@pytest.mark.usefixtures("on_linux")
def test_without_a_compiler(hook: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.shutil, "which", lambda name: None)
    build_data, warnings = initialize(hook, root)
    assert build_data == {"artifacts": [], "pure_python": True}
    (line,) = warnings
    assert "no C++ compiler (tried g++ and clang++)" in line and "\n" not in line
    assert "Products and attention on a CPU are XLA's then" in line


@pytest.mark.usefixtures("on_linux")
def test_a_compiler_that_is_named_and_not_there(
    hook: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is not taken in its place."""
    monkeypatch.setenv("CXX", UNKNOWN)
    with pytest.raises(hook.SkippedError, match=rf"\(\$CXX names {UNKNOWN}\)"):
        hook.build(root)


@pytest.mark.usefixtures("on_linux")
def test_a_compiler_that_is_too_old(
    hook: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(KNOWS_NO_BFLOAT16, tmp_path, monkeypatch)
    with pytest.raises(hook.SkippedError, match=r"does not compile .* \(GCC 10 and clang 9 do\)"):
        hook.build(root)


@pytest.mark.usefixtures("on_linux")
def test_a_tree_that_cannot_be_written(
    hook: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(WRITES, tmp_path, monkeypatch)
    monkeypatch.setattr(hook.os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(hook.SkippedError, match="cpu_kernels cannot be written"):
        hook.build(root)


@pytest.mark.parametrize(
    ("script", "ends"),
    [(FAILS, r"ended with 3:\nproducts\.cc:7: error: no"), (LINK_FAILS, "1:\nld: no such symbol")],
)
@pytest.mark.usefixtures("on_linux")
def test_a_compiler_that_fails_is_an_error(
    hook: Any, root: Path, tmp_path: Path, script: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(script, tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match=ends) as error:
        initialize(hook, root)
    assert "HATCH_BUILD_NO_HOOKS=true installs" in str(error.value)
    assert {path.name for path in (root / hook.FOLDER).iterdir()} == {*hook.SOURCES}


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_other_platforms(
    hook: Any, root: Path, system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook.sys, "platform", system)
    monkeypatch.setattr(hook.platform, "machine", lambda: machine)
    with pytest.raises(hook.SkippedError, match=f"this is {system} on {machine}"):
        hook.build(root)


@pytest.mark.usefixtures("on_linux")
def test_without_headers(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hook.SkippedError, match="no jaxlib with XLA's headers"):
        hook.find_headers()


def test_the_headers_are_those_of_jaxlib(hook: Any) -> None:
    headers = hook.find_headers()
    assert headers.parts[-2:] == ("jaxlib", "include")
    assert hook.ffi_minor(headers) > 0


@pytest.mark.usefixtures("on_linux")
def test_sources_that_do_not_compile(hook: Any, tmp_path: Path) -> None:
    """With a real compiler."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    source = tmp_path / "products.cc"
    source.write_text("int broken(")
    with pytest.raises(RuntimeError, match="error:"):
        hook.compile_library(["g++"], tmp_path, [source], tmp_path / "products.so")
