"""Work of `jaxserve generate --batch-file`: the requests of a file, answered into another one."""

import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console

from jaxserve.errors import RestartingError
from jaxserve.generate.batch_files import (
    LONGEST_LINE,
    BatchOutput,
    BatchRequest,
    LineError,
    parse_line,
    read_lines,
)
from jaxserve.interrupts import interrupts_kept
from jaxserve.llm import LLM
from jaxserve.progress import Bar
from jaxserve.server.core.limits import Limits
from jaxserve.server.lifecycle import FAILED
from jaxserve.server.local_server import LocalServer
from jaxserve.server.model_steps import ModelSteps

REQUESTS_PER_ROW = 4  # that are worked on at a time, so that a free row never waits for one
FIRST_WAIT = 0.1  # seconds until a request is tried again that the machine had no room for
LONGEST_WAIT = 10.0  # seconds; each wait is twice the one before
TRIES = 60
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
    max_tool_bytes=LONGEST_LINE,
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


def run_batch(llm: LLM, name: str, batch: Path, output: BatchOutput, console: Console) -> int:
    """Answer the requests that the output has no answers to yet, and return the exit code.

    The code is 0 when every line has its answer or its error, and 70 when the engine has failed:
    the same command then goes on where this one was.

    Args:
        llm: Model that answers; nothing else may use it.
        name: Name of the model in requests.
        batch: File of requests, one per line.
        output: File of answers, open.
        console: Console for the bar and the last line.

    Raises:
        ConfigError: The output has an answer to another request with the same custom id.
        OSError: The output cannot be written any more.
    """
    steps = ModelSteps(llm, None, bundled=False, console=console)
    steps.compile()  # here, where a Ctrl-C takes effect between two steps
    run = BatchRun(batch, output, console)
    with interrupts_kept():
        return asyncio.run(run.run(llm, name, steps), loop_factory=uvloop.new_event_loop)


class BatchRun:
    """One run over a batch; arguments as in `run_batch`."""

    def __init__(self, batch: Path, output: BatchOutput, console: Console):
        self._batch = batch
        self._output = output
        self._console = console
        self._counts = Counts()
        self._ids: set[str] = set()  # custom ids of the requests that were read

    async def run(self, llm: LLM, name: str, steps: ModelSteps) -> int:
        """Answer the requests and return the exit code."""
        total = sum(1 for _ in read_lines(self._batch))
        began = time.monotonic()
        async with LocalServer(llm, name, LIMITS, steps) as server:
            with Bar(self._console, "answering") as bar:
                await self._answer_all(server, lambda: self._show(bar, total))
        if server.hangs:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            os._exit(FAILED)  # the end of Python would wait for the step
        line = self._counts.summary(time.monotonic() - began)
        self._console.print(line, style="dim", soft_wrap=True, markup=False)
        if server.failure:
            line = f"error: the engine has failed: {server.failure} (the same command goes on)"
            self._console.print(line, soft_wrap=True, markup=False)
            return FAILED
        return 0

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
                for number, line in read_lines(self._batch):
                    request = self._request(number, line)
                    show()
                    if request:
                        await slots.acquire()
                        tasks.create_task(answer(request))
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if not isinstance(error, RestartingError):  # the server has the reason of that
                raise error from None

    def _request(self, number: int, line: bytes) -> BatchRequest | None:
        """Return the request of a line; None where it needs no answer, or can have none."""
        try:
            request = parse_line(line)
            if request.custom_id in self._ids:
                raise LineError("custom_id is that of an earlier line", request.custom_id)
        except LineError as error:
            if self._output.refuse(number, line, error):
                self._counts.failed += 1
            else:
                self._counts.earlier += 1
            return None
        self._ids.add(request.custom_id)
        if self._output.has(request):
            self._counts.earlier += 1
            return None
        return request

    async def _answer(self, server: LocalServer, request: BatchRequest) -> None:
        reply = await server.post(request.url, request.body)
        wait = FIRST_WAIT
        for _ in range(TRIES):
            if server.failure:  # which is no fault of the request
                raise RestartingError("the engine has failed")
            if reply.headers.get("x-should-retry") != "true":
                break
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
            reply = await server.post(request.url, request.body)
        request_id = reply.headers.get("x-request-id", "")
        self._output.answer(request, reply.status_code, reply.content, request_id)
        self._counts.add(reply)

    def _show(self, bar: Bar, total: int) -> None:
        failed = self._counts.failed
        bar.update(self._counts.lines, total, f"{failed:,} with an error" if failed else "")
