"""Actor on one host of an engine, which runs a jaxserve program there."""

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import ray

from jaxserve.ray import tied_process

KEPT_LINES = 20  # of the program's last output
ERROR = "error: "  # begins the line in which a program says why it ends
LONGEST_LINE = 2**16  # bytes; of a longer one the end is kept


@dataclass(frozen=True)
class Ended:
    """End of a program.

    Attributes:
        code: Exit code; the negative number of the signal that killed it.
        lines: The last lines that it has written to standard error.
    """

    code: int
    lines: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Why it ended: its error, the signal that killed it, or the last line."""
        for line in reversed(self.lines):
            if line.startswith(ERROR):
                return line.removeprefix(ERROR)
        if self.code < 0:
            return f"it was killed by {signal.Signals(-self.code).name}"
        return self.lines[-1] if self.lines else "it wrote nothing"


@ray.remote
class HostProcess:
    """Runs one program at a time; its output becomes the actor's, which Ray shows to the driver.

    The program is killed when the actor ends.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[Ended] | None = None

    async def address(self) -> str:
        """Return the address of this host within the cluster."""
        return ray.util.get_node_ip_address()

    async def tpu_worker(self) -> int:
        """Return the number of this host within its TPU slice; 0 where Ray knows of none."""
        labels = ray.get_runtime_context().get_node_labels()
        return int(labels.get("ray.io/tpu-worker-id", 0))

    async def free_ports(self, count: int) -> list[int]:
        """Return ports that nothing listens on."""
        sockets = [socket.socket() for _ in range(count)]
        try:
            for each in sockets:
                each.bind(("", 0))
            return [each.getsockname()[1] for each in sockets]
        finally:
            for each in sockets:
                each.close()

    async def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], token: str = ""
    ) -> None:
        """Start `jaxserve` with arguments, and more variables than the actor has.

        Args:
            token: Token for a --token-file of the program; empty for none.
        """
        command = [sys.executable, "-m", "jaxserve", *arguments]
        files = []
        if token:  # in memory: nothing of it is left when a host is lost
            files.append(os.memfd_create("token"))
            os.write(files[0], token.encode())
            command += ["--token-file", f"/proc/self/fd/{files[0]}"]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, tied_process.__file__, str(os.getpid()), *command),
                env={**os.environ, **environment},
                pass_fds=files,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        finally:
            for file in files:
                os.close(file)
        self._ended = asyncio.create_task(self._run(self._process))

    async def _run(self, process: asyncio.subprocess.Process) -> Ended:
        assert process.stderr
        last: deque[str] = deque(maxlen=KEPT_LINES)
        async for line in _lines(process.stderr):
            text = line.decode(errors="replace").rstrip()
            last.append(text)
            print(text, file=sys.stderr, flush=True)
        return Ended(await process.wait(), tuple(last))

    async def end(self) -> Ended | None:
        """Return the end of the program; None while it runs, or before one was started."""
        return self._ended.result() if self._ended and self._ended.done() else None

    async def stop(self, seconds: float) -> None:
        """End the program with SIGTERM, and after so many seconds with SIGKILL."""
        if not self._process or not self._ended or self._ended.done():
            return
        if self._process.returncode is None:
            self._process.terminate()
        await asyncio.wait([self._ended], timeout=seconds)
        if self._process.returncode is None:
            self._process.kill()
        await self._ended


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, which may be of any length."""
    rest = b""
    while chunk := await stream.read(LONGEST_LINE):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[-LONGEST_LINE:]
        for line in lines:
            yield line
    if rest:
        yield rest
