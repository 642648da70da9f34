"""Images, and what publishes them: every RUN line of the Dockerfiles, without Docker."""

import json
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
OURS = ("gpu", "tpu")
SOURCE, WHEEL = "/source", "/wheel"  # absolute paths of the Dockerfiles
PROGRAMS = {"pip", "rm", "useradd"}  # in their RUN lines


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile with what stands behind them."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.M).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, value = line.partition(" ")
        yield name, value


def sent_to_docker(target: Path) -> None:
    """Copy what `docker build` sees of this repository: what .dockerignore names after `!`."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*" and lines[-1] == "**/__pycache__", "what this function knows"
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            no_caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy, symlinks=True, ignore=no_caches)
        else:
            shutil.copy(source, copy)


class Image:
    """What an image would be, in folders: an environment for each FROM, and the absolute paths."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stages = 0

    def start(self) -> None:
        """Begin with an environment that has only pip, as after FROM python."""
        self._stages += 1
        self._bin = self._folder / f"stage{self._stages}" / "bin"
        venv.create(self._bin.parent, with_pip=True)
        self._work = self._folder / f"root{self._stages}"
        self._work.mkdir()
        useradd = self._bin / "useradd"  # not on this machine
        useradd.write_text("#!/bin/sh\n")
        useradd.chmod(0o755)

    def go_to(self, folder: str) -> None:
        self._work = self._folder / folder.strip("/")
        sent_to_docker(self._work)

    def run(self, command: str) -> str:
        """Run a command with the image's paths below the folder."""
        programs = {part.split()[0] for part in command.split("&&")}
        assert programs <= PROGRAMS | {"python", "smg"}, "it might change this machine"
        assert set(re.findall(r"(?<![\w*])/\w+", command)) <= {SOURCE, WHEEL}, command
        for path in (SOURCE, WHEEL):
            command = command.replace(f" {path}", f" {self._folder}{path}")
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env["PATH"] = f"{self._bin}:/usr/bin:/bin"
        done = subprocess.run(
            ["sh", "-c", command], cwd=self._work, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.mark.slow  # they install gigabytes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*OURS, "smg"])
def test_an_image_is_built_and_starts(name: str, tmp_path: Path) -> None:
    image = Image(tmp_path)
    starts: dict[str, list[str]] = {"CMD": ["--help"]}
    for instruction, value in instructions(DEPLOY / f"Dockerfile.{name}"):
        if instruction == "FROM":
            image.start()
        elif instruction == "WORKDIR":
            image.go_to(value)
        elif instruction == "RUN":
            image.run(value)
        elif instruction in ("ENTRYPOINT", "CMD"):
            starts[instruction] = json.loads(value)
        else:
            assert instruction in ("COPY", "ENV", "USER"), instruction
    assert "usage" in image.run(" ".join(starts["ENTRYPOINT"] + starts["CMD"])).lower()
    if name in OURS:
        where = image.run('python -c "import jaxserve; print(jaxserve.__file__)"').strip()
        assert Path(where).is_relative_to(tmp_path / "stage2"), "the source tree was imported"


def test_docker_is_sent_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    sent_to_docker(tmp_path / "context")
    names = {path.name for path in (tmp_path / "context").iterdir()}
    links = {path.name for path in (ROOT / "jaxserve").iterdir() if path.is_symlink()}
    assert links <= names and {"pyproject.toml", "README.md", "LICENSE", "deploy"} <= names
    assert not names & {".git", "tests", "training"}


def test_a_release_publishes_every_image_of_ours() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    images = workflow["jobs"]["images"]
    assert set(images["strategy"]["matrix"]["device"]) == set(OURS)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    targets = re.findall(r"make ([a-z-]+)", " ".join(step.get("run", "") for step in steps))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(f"\n{target}:" in makefile for target in targets)
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert workflow["permissions"] == {}, "each job asks for what it needs"
