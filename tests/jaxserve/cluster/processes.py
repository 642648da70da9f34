"""A pod on one machine: processes with two CPU devices each."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.compiled_steps import compiled_steps_folder

ROOT = Path(__file__).parents[3]
DRAFT = ROOT / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL = [
    "--max-batch",
    "2",
    "--step-tokens",
    "32",
    "--page-size",
    "16",
    "--max-context",
    "512",
    "--dtype",
    "float32",
]
CACHE = ["--compilation-cache", str(compiled_steps_folder())]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Host:
    """One process of a pod; its output goes to files, so that it never waits for a reader."""

    popen: "subprocess.Popen[bytes]"
    out: IO[bytes]
    err: IO[bytes]

    @staticmethod
    def start(program: str, *flags: str, **variables: str) -> "Host":
        command = [
            sys.executable,
            "-m",
            f"jaxserve.{program}",
            "--model",
            str(DRAFT),
            *SMALL,
            *CACHE,
            *flags,
        ]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} | variables
        out = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the pod)
        err = tempfile.TemporaryFile()  # noqa: SIM115
        return Host(
            subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=environment), out, err
        )

    @property
    def output(self) -> str:
        self.out.seek(0)
        return self.out.read().decode()

    @property
    def errors(self) -> str:
        self.err.seek(0)
        return self.err.read().decode()

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]


@dataclass
class Pod:
    """Hosts of one pod; those that still run at the end are killed."""

    size: int
    program: str = "generate"
    hosts: dict[int, Host] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    def start(self, index: int, *flags: str) -> Host:
        place = [
            "--hosts",
            str(self.size),
            "--host-index",
            str(index),
            "--coordinator",
            f"127.0.0.1:{self.port}",
        ]
        self.hosts[index] = Host.start(self.program, *place, *flags)
        return self.hosts[index]

    def start_all(self, *flags: str) -> "Pod":
        for index in range(self.size):
            self.start(index, *flags)
        return self

    def wait(self) -> list[int]:
        """Wait for the processes; return exit codes by host."""
        until = time.monotonic() + 240
        return [
            self.hosts[i].popen.wait(max(0.1, until - time.monotonic())) for i in sorted(self.hosts)
        ]

    @property
    def all_output(self) -> str:
        """Return the output of all hosts, to show when a test fails."""
        return "".join(
            f"--- host {i}\n{host.output}{host.errors}" for i, host in sorted(self.hosts.items())
        )

    def __enter__(self) -> "Pod":
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.popen.kill()
            host.popen.wait()
            host.out.close()
            host.err.close()
