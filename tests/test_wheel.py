"""What the built wheel contains, and what it does in an environment that has nothing else."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.compiled_steps import compiled_steps_folder
from tests.test_taken_names import with_taken_names

ROOT = Path(__file__).parents[1]


def runs(uv: str) -> bool:
    """Return whether this uv starts: a pyenv shim may refuse to."""
    return not subprocess.run([uv, "--version"], capture_output=True).returncode


UV = next(
    (
        path
        for path in (shutil.which("uv"), str(Path(sys.executable).with_name("uv")))
        if path and Path(path).exists() and runs(path)
    ),
    None,
)
SMALL = ("--max-batch", "1", "--max-context", "64", "--step-tokens", "16")
CACHES = {"JAX_COMPILATION_CACHE_DIR": str(compiled_steps_folder())}
CONSTRAINTS = ROOT / "constraints.txt"
BUILD = ("build", "--quiet", "--python", sys.executable, "--build-constraints", CONSTRAINTS)
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(UV is None, reason="there is no uv, which `make` installs"),
]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this environment's variables, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= CACHES | {"XDG_CACHE_HOME": str(cwd / "cache"), "UV_CACHE_DIR": uv_cache()}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    if command[0] == UV and done.returncode and "error sending request" in done.stderr:
        pytest.skip("the registry of packages cannot be reached")
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def uv_cache() -> str:
    assert UV
    return subprocess.check_output([UV, "cache", "dir"], text=True).strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source distribution, and the wheel that was built from it.

    A release names its own by JAXSERVE_DIST.
    """
    assert UV
    if made := os.environ.get("JAXSERVE_DIST"):
        return ROOT / made
    folder = tmp_path_factory.mktemp("dist")
    run(UV, *BUILD, "--out-dir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("jaxserve-*.whl")
    return wheel


def test_the_wheel_has_one_package_and_only_what_runs(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0].rpartition(".")[2] for name in names} == {
        *("jaxserve", "dist-info", "data"),
    }
    assert wheel.stat().st_size < 10e6
    for part in (
        *("jaxserve/py.typed", "jaxserve/server/http/page_files/index.html"),
        *("jaxserve/sharding/gpus/h200.textproto", "jaxserve/pallas_kernels/dispatch.py"),
        "jaxserve/checkpoints/bundled/tiny-chat/model.safetensors",
    ):
        assert part in names
    assert any(name.endswith("bash-completion/completions/jaxserve") for name in names)
    assert not [name for name in names if re.search(r"(^|/)(tests|training|benchmarks)/", name)]
    assert not [name for name in names if name.endswith((".grammar", ".pyc"))]
    assert "jaxserve/checkpoints/convert.py" not in names, "a name that only checkouts have"


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("g++"),
    reason="needs g++ on Linux on x86-64",
)
def test_the_wheel_has_the_kernels_of_a_cpu(wheel: Path) -> None:
    libraries = [name for name in ZipFile(wheel).namelist() if ".so" in name]
    assert len(libraries) == 1
    assert re.fullmatch(r"jaxserve/cpu_kernels/libcpu_kernels\.so\.\d+", libraries[0])
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(files.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata.get_payload()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    extras = {"tpu", "cuda13", "otel", "smg", "compilers"}
    assert extras <= set(metadata.get_all("Provides-Extra", []))


@pytest.mark.slow
def test_the_wheel_of_the_checkout_is_that_of_the_source_distribution(
    wheel: Path, tmp_path: Path
) -> None:
    assert UV
    run(UV, *BUILD, "--wheel", "--out-dir", tmp_path, ROOT, cwd=tmp_path)
    (other,) = tmp_path.glob("jaxserve-*.whl")
    assert contents(other) == contents(wheel)


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksums of a wheel's files, by name."""
    return {file.filename: file.CRC for file in ZipFile(wheel).infolist()}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder bin of an environment that has the wheel and its requirements, nothing else."""
    assert UV
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    install = ("pip", "install", "--quiet", "--python", python, "--constraints", CONSTRAINTS)
    run(UV, *install, wheel, cwd=folder)
    yield python.parent
    shutil.rmtree(folder / "venv")


def test_the_wheel_generates(installed: Path, tmp_path: Path) -> None:
    where = run(
        installed / "python", "-c", "import jaxserve; print(*jaxserve.__path__)", cwd=tmp_path
    )
    assert where.startswith(str(installed.parent)), "the source tree was imported"
    flags = ("--prompt", "Once upon a time", "--max-tokens", "8", "--temperature", "0", "--json")
    done = json.loads(run(installed / "jaxserve", "generate", *flags, cwd=tmp_path))
    assert done["finish_reason"] in ("length", "stop") and done["text"]


def test_the_wheel_serves(installed: Path, tmp_path: Path) -> None:
    """In a folder with files that are called like folders of this repository."""
    with_taken_names(tmp_path)
    # `python -m` puts the folder first, which the command does not.
    python = (installed / "python", "-m")
    server = subprocess.Popen(
        [*python, "jaxserve.serve", "--port", "0", "--http-port", "0", *SMALL],
        cwd=tmp_path,
        env=CACHES | {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            assert server.stderr
            told = []
            for line in server.stderr:
                told.append(line)
                if "ready: " in line:
                    break
            else:
                pytest.fail("the server ended: " + "".join(told))
            (address,) = re.findall(r"gRPC ([^ ,]+)", told[-1])
            flags = ("--address", address, "--max-tokens", "8", "--temperature", "0")
            assert run(*python, "jaxserve.client", *flags, "Once upon a time", cwd=tmp_path)
        finally:
            server.terminate()
            server.communicate()  # to its end: a closed pipe would be an error of the server
    assert server.returncode == 0


def test_every_requirement_has_a_wheel_for_macs() -> None:
    """On arm64 and a CPU; that it runs there is not shown."""
    assert UV
    target = ("--python-platform", "aarch64-apple-darwin", "--python-version", "3.12")
    compiled = run(
        *(UV, "pip", "compile", "--quiet", *target, "--only-binary", ":all:"),
        *("--constraints", CONSTRAINTS, ROOT / "pyproject.toml"),
        cwd=ROOT,
    )
    assert "jaxlib==" in compiled and "tensorstore==" in compiled
