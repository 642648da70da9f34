"""The sides of the comparison: programs that are given the same requests, in turns."""

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.offline.workload import EQUAL_TOKENS, MIXED_LENGTHS, job

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one turn with as many requests as streams, all of one length."""

    prompts: float  # of the prompts, until all first tokens are there
    decode: float  # of the outputs, from then on
    both: float  # of the outputs, in the whole time

    @staticmethod
    def of(
        streams: int,
        prompt_tokens: int,
        decoded: int,
        prompt_seconds: float,
        decode_seconds: float,
    ) -> "Rates":
        """Return the rates.

        Args:
            prompt_tokens: Tokens of each prompt.
            decoded: Tokens of each output that were made in `decode_seconds`.
        """
        return Rates(
            streams * prompt_tokens / prompt_seconds,
            streams * decoded / decode_seconds,
            streams * EQUAL_TOKENS / (prompt_seconds + decode_seconds),
        )


class Side(ABC):
    """A program with the model in one precision.

    Args:
        prompt_tokens: Tokens of each prompt.
    """

    def __init__(self, program: str, precision: str, prompt_tokens: int):
        self.program = program
        self.precision = precision
        self.prompt_tokens = prompt_tokens

    @abstractmethod
    def equal(self, streams: int) -> Rates:
        """Run as many requests as streams, of EQUAL_TOKENS each, and return the rates."""

    def mixed(self, streams: int, requests: int) -> float | None:
        """Run requests of mixed lengths and return their tokens per second.

        None where the program runs no such requests.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """End what runs between turns."""


class Worker(Side):
    """A process that stays and answers jobs, pinned to so many cores.

    Args:
        command: Command of the process, which reads and writes JSON lines.
    """

    def __init__(
        self,
        program: str,
        precision: str,
        prompt_tokens: int,
        command: Sequence[str],
        threads: int,
    ):
        super().__init__(program, precision, prompt_tokens)
        cores = usable_cores(threads)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self._read()

    def equal(self, streams: int) -> Rates:
        first = self._seconds(job(streams, [1] * streams, self.prompt_tokens))
        whole = self._seconds(job(streams, [EQUAL_TOKENS] * streams, self.prompt_tokens))
        return Rates.of(streams, self.prompt_tokens, EQUAL_TOKENS - 1, first, whole - first)

    def mixed(self, streams: int, requests: int) -> float:
        lengths = MIXED_LENGTHS[:requests]
        return sum(lengths) / self._seconds(job(streams, lengths, self.prompt_tokens))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _seconds(self, job: dict[str, Any]) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"{self.program} {self.precision} ended with exit code {code}")
        return json.loads(line)


def usable_cores(threads: int) -> list[int]:
    """Return the first cores that this process may use, one for each thread."""
    return sorted(os.sched_getaffinity(0))[:threads]


def ours(folder: Path, precision: str, prompt_tokens: int, threads: int, cache: Path) -> Worker:
    """Return jaxserve's side.

    Args:
        cache: Folder of compiled steps.
    """
    context = prompt_tokens + max(EQUAL_TOKENS, *MIXED_LENGTHS)
    command = [sys.executable, "-m", "benchmarks.offline.ours"]
    command += [str(folder), precision, str(context), str(cache)]
    return Worker("jaxserve", precision, prompt_tokens, command, threads)


def transformers(
    python: str, folder: Path, precision: str, prompt_tokens: int, threads: int
) -> Worker:
    """Return the side of transformers, run by an interpreter that has it."""
    # -P: transformers looks for a package called kernels, and must not find this folder's file.
    script = str(HERE / "transformers_peer.py")
    command = [python, "-P", script, str(folder), precision, str(threads)]
    return Worker("transformers", precision, prompt_tokens, command, threads)
