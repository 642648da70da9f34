"""What `pip install` of the built wheel gives to somebody who has nothing else."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "checkpoints")


def run(*command: str | Path, cwd: Path) -> str:
    # PYTHONPATH out: nothing of the source tree may help.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"XDG_CACHE_HOME": str(cwd / "cache")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_generates_in_an_empty_environment(tmp_path: Path) -> None:
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("jaxserve-*.whl")
    assert wheel.stat().st_size < 20e6
    names = ZipFile(wheel).namelist()
    assert "jaxserve/server/http/page_files/index.html" in names
    beside = (".dist-info/", ".data/")
    packages = [name for name in names if not any(part in name for part in beside)]
    assert {name.split("/")[0] for name in packages} == set(PACKAGES)
    assert any(name.endswith("bash-completion/completions/jaxserve") for name in names)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, *pip, "install", wheel, cwd=tmp_path)
    flags = ("--prompt", "Once upon a time", "--max-tokens", "8", "--temperature", "0", "--json")
    done = json.loads(run(python, "-m", "jaxserve.generate", *flags, cwd=tmp_path))
    assert done["finish_reason"] in ("length", "stop") and done["text"]
    where = run(python, "-c", "import jaxserve; print(jaxserve.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path)), "the source tree was imported"
