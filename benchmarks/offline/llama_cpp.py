"""llama.cpp's side of benchmarks.offline: its own llama-batched-bench, built from source.

The source is the one that the source distribution of llama-cpp-python carries.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from benchmarks.offline.sides import HERE, Rates, Side, usable_cores
from benchmarks.offline.workload import EQUAL_TOKENS

SOURCE: Final = "llama-cpp-python==0.3.36"
PROGRAM: Final = "llama-batched-bench"
PRECISIONS: Final = ("f32", "bf16", "q8_0")
SWITCHED_OFF: Final = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER")


class BuildError(Exception):
    """llama.cpp cannot be built here."""


def build(folder: Path) -> Path:
    """Build the program in a folder, unless it is there already, and return its path.

    Raises BuildError with the last lines of the step that failed.
    """
    program = folder / "build" / "bin" / PROGRAM
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    _run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        + ["--no-binary", "llama-cpp-python", SOURCE, "--dest", str(folder)]
    )
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    switches = [f"-D{name}=OFF" for name in SWITCHED_OFF]
    build = str(folder / "build")
    _run(["cmake", "-S", str(source), "-B", build, "-DCMAKE_BUILD_TYPE=Release", *switches])
    jobs = str(len(os.sched_getaffinity(0)))
    _run(["cmake", "--build", build, "--target", PROGRAM, "--parallel", jobs])
    return program


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-3:])
        raise BuildError(f"{' '.join(command[:4])} ...: {tail}")


class LlamaCpp(Side):
    """llama.cpp with the model in one precision; its program is started anew for every turn.

    Args:
        program: Path of llama-batched-bench.
        python: Interpreter that has gguf, which writes the model in llama.cpp's format.
        folder: Folder of the model, and of the file that is written.
    """

    def __init__(
        self,
        program: Path,
        python: str,
        folder: Path,
        precision: str,
        prompt_tokens: int,
        threads: int,
    ):
        super().__init__("llama.cpp", precision, prompt_tokens)
        self._program = program
        self._threads = threads
        self._file = folder / f"{precision}.gguf"
        if not self._file.exists():
            script = str(HERE / "write_gguf.py")
            subprocess.run(
                [python, "-P", script, str(folder), precision, str(self._file)], check=True
            )

    def equal(self, streams: int) -> Rates:
        cores = usable_cores(self._threads)
        threads = str(self._threads)
        context = streams * (self.prompt_tokens + EQUAL_TOKENS)  # of all streams together
        done = subprocess.run(
            [str(self._program), "--model", str(self._file), "--ctx-size", str(context)]
            + ["--threads", threads, "--threads-batch", threads, "--output-format", "jsonl"]
            + ["-npp", str(self.prompt_tokens), "-ntg", str(EQUAL_TOKENS), "-npl", str(streams)],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        found = json.loads(line)
        return Rates.of(streams, self.prompt_tokens, EQUAL_TOKENS, found["t_pp"], found["t_tg"])

    def close(self) -> None:
        """Do nothing: no process runs between turns."""
