"""The files by which shells complete the command `jaxserve`."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "deploy" / "completions"
# What bash calls for the last word of a line, and what that finds.
BASH = """
source {file}
COMP_WORDS=({line})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_jaxserve "${{COMP_WORDS[0]}}" "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_completions", FOLDER / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_up_to_date(maker: ModuleType) -> None:
    for shell, name in maker.FILES.items():
        assert (FOLDER / name).read_text() == maker.completion(shell), "run make completions"


@pytest.mark.system
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("jaxserve ge", "generate"),
        ("jaxserve generate --max", "--max-tokens --max-batch --max-context"),
        ("jaxserve serve --prefer lat", "latency"),
        ("jaxserve bench off", "offline"),
        ("jaxserve bench offline --rep", "--repetitions"),
        ("jaxserve plan --out-of", ""),
        ("jaxserve generate --model {root}/checkpoints/bun", "{root}/checkpoints/bundled"),
    ],
)
def test_what_bash_offers(line: str, found: str) -> None:
    root = FOLDER.parents[1]
    script = BASH.format(file=FOLDER / "jaxserve.bash", line=line.format(root=root))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found.format(root=root)
