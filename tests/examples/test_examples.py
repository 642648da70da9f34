"""The examples run, on a CPU and a small model."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.embedding_model import with_tokenizer
from tests.slow_cases import slow_but

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODEL = ROOT / "checkpoints" / "bundled" / "tiny-chat"
TESTED = ("batch.py", "chat.py", "structured.py", "embeddings.py")
NOTEBOOKS = ("quickstart.ipynb", "tpu_colab.ipynb")


def run(
    name: str, *args: str, monkeypatch: pytest.MonkeyPatch, lines: Iterator[str] | None = None
) -> None:
    """Run an example in this process, as `python examples/name args` does in one of its own."""
    monkeypatch.setattr(sys, "argv", [name, *args])
    if lines is not None:
        monkeypatch.setattr(sys, "stdin", lines)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_tested() -> None:
    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    on_ray = [name for name in names if name.startswith("ray_")]  # tests/cluster/test_examples.py
    assert sorted(names) == sorted([*TESTED, *NOTEBOOKS, *on_ray])


def test_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [{"id": f"p{n}", "prompt": "Once upon a time"} for n in range(3)]
    lines = iter([json.dumps(prompt) for prompt in prompts])
    args = ("--model", str(MODEL), "--max-tokens", "4")
    run("batch.py", *args, monkeypatch=monkeypatch, lines=lines)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["id"] for answer in answers] == ["p0", "p1", "p2"]
    assert all(answer["text"] and answer["finish_reason"] == "length" for answer in answers)
    assert len({answer["seed"] for answer in answers}) == 3


def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = iter(["What is 7 plus 5?", "What is 20 minus 3?"])

    def typed(prompt: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    run("chat.py", "--model", str(MODEL), monkeypatch=monkeypatch)
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.system
def test_structured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("structured.py", "--model", str(MODEL), monkeypatch=monkeypatch)
    assert capsys.readouterr().out.startswith("Animal(name=")


def test_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(with_tokenizer(tmp_path / "model"))
    texts = ("w5 w6 w7", "w1 w2", "w90")
    args = ("--model", folder, "--instruction", "", "w1 w2", *texts)
    run("embeddings.py", *args, monkeypatch=monkeypatch)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split() == ["1.000", "w1", "w2"] and len(others) == 2


def on_a_cpu(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook without the cells that install, on the bundled model."""
    cells = []
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags", [])
        source = "".join(cell["source"])
        if "install" in tags:
            continue
        if "model" in tags:
            kept = [line for line in source.splitlines() if "huggingface_hub" not in line]
            kept = [line for line in kept if not line.startswith("MODEL =")]
            source = "\n".join([f"MODEL = {str(MODEL)!r}", *kept])
        cells.append(cell | {"source": source} | ({"outputs": []} if "outputs" in cell else {}))
    return notebook | {"cells": cells}


@pytest.mark.system
@pytest.mark.parametrize("name", slow_but(NOTEBOOKS, ["quickstart.ipynb"]))
def test_notebooks(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(on_a_cpu(json.loads((EXAMPLES / name).read_text()))))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    execute = Path(sys.executable).with_name("jupyter-execute")
    subprocess.run([execute, "--inplace", path], env=environment, cwd=tmp_path, check=True)

    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    bars = [o["data"] for o in outputs if o["output_type"] == "display_data"]
    assert bars and all("".join(bar["text/html"]) == "" for bar in bars), "every bar is cleared"
