"""Programs in a folder whose files have the names of the folders beside jaxserve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
DRAFT = ROOT / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL = ("--max-batch", "1", "--max-context", "64", "--step-tokens", "16")
COMMANDS = {
    "generate": (str(DRAFT), "Once", "--max-tokens", "2", *SMALL),
    "plan": ("llama3.1-8b", "--topology", "v5e:2x4", "--no-compile"),
    "convert": (str(DRAFT), "converted"),
    "doctor": ("--json",),
    "bench offline": (
        *("--model", str(DRAFT), "--batch", "1", "--prompt-tokens", "4", "--output-tokens", "2"),
        *SMALL,
    ),
}
# The first entry of sys.path is this folder, as with `python -m` and in a notebook.
SCRIPT = """
import json, sys
from jaxserve.programs import start
codes = {}
for command, flags in json.loads(sys.argv[1]).items():
    codes[command] = start([*command.split(), *flags])
print(json.dumps(codes))
"""
IMPORTS = """
import pkgutil, jaxserve
from jaxserve import LLM
names = [module.name for module in pkgutil.walk_packages(jaxserve.__path__, "jaxserve.")]
for name in names:
    if not name.endswith((".worker", ".smg", ".ray")):
        __import__(name)
from jaxserve.pallas_kernels.paged_attention import gpu_plan, tpu_plan
assert gpu_plan._table() is not None and tpu_plan._table() is not None  # files of the package
print(len(names))
"""


def with_taken_names(folder: Path) -> Path:
    """Write the files, which must not be imported, and return the folder."""
    refuse = "raise ImportError(f'{__file__} was imported')\n"
    (folder / "sharding.py").write_text(refuse)
    (folder / "pallas_kernels.py").write_text(refuse)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "__init__.py").write_text(refuse)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_taken_names(tmp_path)


def python(folder: Path, script: str, *arguments: str) -> str:
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.system
def test_the_files_are_those_that_python_finds_first(folder: Path) -> None:
    for name in ("sharding", "pallas_kernels", "checkpoints"):
        script = f"try: import {name}\nexcept ImportError as error: print(error)"
        assert str(folder) in python(folder, script)


@pytest.mark.system
def test_commands_run(folder: Path) -> None:
    codes = json.loads(python(folder, SCRIPT, json.dumps(COMMANDS)))
    assert codes.pop("doctor") in (0, 1), "the machine may have faults"
    assert codes == dict.fromkeys(codes, 0)


@pytest.mark.system
def test_every_module_can_be_imported(folder: Path) -> None:
    """Those of serve and client, which tests/test_wheel.py runs in such a folder, among them."""
    assert int(python(folder, IMPORTS)) > 300


@pytest.mark.system
def test_a_notebook_imports_it(folder: Path) -> None:
    cell = nbformat.v4.new_code_cell("from jaxserve import LLM\nLLM.__module__")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    metadata = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="python3", resources=metadata).execute()
    (output,) = notebook.cells[0].outputs
    assert output["data"]["text/plain"] == "'jaxserve.llm'"
