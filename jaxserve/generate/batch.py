"""Work of `jaxserve generate --batch-file`: the requests of a file, answered into another one."""

import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import uvloop
from rich.console import Console

from jaxserve.errors import RestartingError
from jaxserve.generate.batch_files import BatchOutput, read_requests
from jaxserve.generate.batch_format import LONGEST_LINE, BatchRequest, LineError
from jaxserve.interrupts import interrupts_kept
from jaxserve.llm import LLM
from jaxserve.progress import Bar
from jaxserve.server.core.limits import Limits
from jaxserve.server.lifecycle import FAILED
from jaxserve.server.local_server import LocalServer
from jaxserve.server.model_steps import ModelSteps

if TYPE_CHECKING:
    from jaxserve.cluster.bootstrap import SingleHost
    from jaxserve.cluster.leader import Leader

REQUESTS_PER_ROW = 4  # that are worked on at a time, so that a free row never waits for one
FIRST_WAIT = 0.1  # seconds until a request is tried again that the machine had no room for
LONGEST_WAIT = 10.0  # seconds; each wait is twice the one before
TRIES = 10  # of a request for which there is no room although no other one runs
UNLIMITED = 2**62
# What bounds a server against its clients would only end requests of a file, of which few are
# worked on at a time.
LIMITS = replace(
    Limits(),
    max_waiting_requests=UNLIMITED,
    max_waiting_tokens=UNLIMITED,
    max_input_bytes=UNLIMITED,
    max_body_bytes=LONGEST_LINE,
    max_prompt_bytes=LONGEST_LINE,
    max_tools=UNLIMITED,
    max_tool_bytes=LONGEST_LINE,
    max_unread_tokens=UNLIMITED,
    max_request_seconds=1e9,
)


@dataclass
class Counts:
    """Numbers of lines and tokens so far."""

    answered: int = 0
    failed: int = 0  # lines with an error
    earlier: int = 0  # lines that an earlier run has dealt with
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def lines(self) -> int:
        """Number of lines that are dealt with."""
        return self.answered + self.failed + self.earlier

    def add(self, reply: httpx.Response) -> None:
        """Count a reply."""
        if reply.is_error:
            self.failed += 1
            return
        self.answered += 1
        usage: dict[str, Any] = reply.json()["usage"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.output_tokens += usage.get("completion_tokens", 0)  # embeddings have none

    def summary(self, seconds: float) -> str:
        """Return the last line of a run that took so many seconds."""
        parts = [f"{self.answered:,} answered"]
        if self.failed:
            parts.append(f"{self.failed:,} with an error")
        if self.earlier:
            parts.append(f"{self.earlier:,} dealt with before")
        tokens = f"{self.prompt_tokens:,} tokens in, {self.output_tokens:,} out"
        rate = f", {self.output_tokens / seconds:,.1f} tokens/s" if seconds else ""
        return f"{', '.join(parts)}; {tokens}; {seconds:,.1f} s{rate}"


def run_batch(
    llm: LLM,
    name: str,
    batch: Path,
    output: BatchOutput,
    lines: int,
    console: Console,
    pod: "SingleHost | Leader",
) -> int:
    """Answer the requests that the output has no answers to yet, and return the exit code.

    The code is 0 when every line has its answer or its error, and 70 when the engine has failed:
    the same command then goes on where this one was. The process ends here when a step hangs.

    Args:
        llm: Model that answers; nothing else may use it.
        name: Name of the model in requests.
        batch: File of requests, one per line.
        output: File of answers, open.
        lines: Number of lines of the batch.
        console: Console for the bar and the last line.
        pod: Hosts that run the model's steps.

    Raises:
        ConfigError: The output has an answer to another request with the same custom id.
        OSError: The output cannot be written any more.
    """
    steps = ModelSteps(llm, None, bundled=False, console=console)
    steps.compile()  # here, where a Ctrl-C takes effect between two steps
    run = BatchRun(batch, output, lines, console)
    try:
        with interrupts_kept():
            return asyncio.run(run.run(llm, name, steps), loop_factory=uvloop.new_event_loop)
    finally:
        # After an error or a Ctrl-C as well: what a step uses must not be freed, and the end of
        # Python would wait for the step.
        if run.hangs:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            run.say_failed("a step does not end")
            pod.fail()
            os._exit(FAILED)


class BatchRun:
    """One run over a batch; arguments as in `run_batch`."""

    def __init__(self, batch: Path, output: BatchOutput, lines: int, console: Console):
        self._batch = batch
        self._output = output
        self._lines = lines
        self._console = console
        self._counts = Counts()
        self._running = 0  # requests that the server has
        self._server: LocalServer | None = None

    @property
    def hangs(self) -> bool:
        """Return whether the engine is in a step that does not end, once the run is over."""
        return self._server is not None and self._server.hangs

    async def run(self, llm: LLM, name: str, steps: ModelSteps) -> int:
        """Answer the requests and return the exit code."""
        began = time.monotonic()
        self._server = LocalServer(llm, name, LIMITS, steps)
        async with self._server as server:
            with Bar(self._console, "answering") as bar:
                await self._answer_all(server, lambda: self._show(bar))
        line = self._counts.summary(time.monotonic() - began)
        self._console.print(line, style="dim", soft_wrap=True, markup=False)
        if not server.failure:
            return 0
        if not server.hangs:  # else run_batch says so
            self.say_failed(server.failure)
        return FAILED

    def say_failed(self, reason: object) -> None:
        """Say why the engine has failed."""
        line = f"error: the engine has failed: {reason} (the same command goes on)"
        self._console.print(line, soft_wrap=True, markup=False)

    async def _answer_all(self, server: LocalServer, show: Callable[[], None]) -> None:
        """Answer the requests, or raise the first error that concerns all of them."""
        slots = asyncio.Semaphore(REQUESTS_PER_ROW * server.rows)

        async def answer(request: BatchRequest) -> None:
            try:
                await self._answer(server, request)
            finally:
                slots.release()
            show()

        try:
            async with asyncio.TaskGroup() as tasks:
                for number, line, found in read_requests(self._batch):
                    request = self._to_answer(number, line, found)
                    show()
                    if request:
                        await slots.acquire()
                        tasks.create_task(answer(request))
                    else:
                        await asyncio.sleep(0)  # let answers come in between two lines
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if not isinstance(error, RestartingError):  # the server has the reason of that
                raise error from None

    def _to_answer(
        self, number: int, line: bytes, found: BatchRequest | LineError
    ) -> BatchRequest | None:
        """Return the request of a line; None where it needs no answer, or can have none."""
        if isinstance(found, LineError):
            if self._output.refuse(number, line, found):
                self._counts.failed += 1
            else:
                self._counts.earlier += 1
            return None
        if self._output.has(found):
            self._counts.earlier += 1
            return None
        return found

    async def _answer(self, server: LocalServer, request: BatchRequest) -> None:
        reply = await self._post(server, request)
        wait = FIRST_WAIT
        tries = 1
        while reply.headers.get("x-should-retry") == "true" and tries < TRIES:
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
            if not self._running:  # else the end of another one may make room
                tries += 1
            reply = await self._post(server, request)
        request_id = reply.headers.get("x-request-id", "")
        self._output.answer(request, reply.status_code, reply.content, request_id)
        self._counts.add(reply)

    async def _post(self, server: LocalServer, request: BatchRequest) -> httpx.Response:
        """Return the server's reply; RestartingError where the engine's failure is the reason."""
        self._running += 1
        try:
            reply = await server.post(request.url, request.body)
        finally:
            self._running -= 1
        if server.failure and reply.is_error:
            raise RestartingError("the engine has failed")
        return reply

    def _show(self, bar: Bar) -> None:
        failed = self._counts.failed
        bar.update(self._counts.lines, self._lines, f"{failed:,} with an error" if failed else "")
