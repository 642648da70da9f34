"""Chat templates rendered in a process of their own, which can be killed."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from jaxserve.errors import ChatError
from jaxserve.tokenizer import MARK

WORKER = Path(__file__).with_name("worker.py")
MAX_TEMPLATE_BYTES = 256 * 1024
MAX_REQUEST_BYTES = 32 * 2**20  # messages and variables, as JSON
MAX_RENDERED_BYTES = 16 * 2**20
MAX_MEMORY = 512 * 2**20
SECONDS = 5.0
START_SECONDS = 60.0
MAX_ANSWER_BYTES = 6 * MAX_RENDERED_BYTES + 1024  # a letter in JSON is up to six times as long as in UTF-8


@dataclass(frozen=True)
class Look:
    """words: strings and names in a template's code. sought: those that it compares or gives to a method.

    takes_tools: it has a use for `tools`. joins_arguments: it adds a call's arguments to a text, so they must be one.
    """

    words: frozenset[str]
    sought: frozenset[str]
    takes_tools: bool
    joins_arguments: bool


class TemplateRenderer:
    """Renders any templates, one after the other; for use from several threads.

    The process starts with the first call. It is killed when an answer takes longer than `seconds` (of clock time),
    and whenever it has died the next call starts another. Everything that goes wrong is a ChatError.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that a template makes of its variables, which are plain JSON values."""
        return self._ask({"template": template, "variables": variables})["text"]

    def look(self, template: str) -> Look:
        """What a template's code says."""
        answer = self._ask({"template": template})
        return Look(
            frozenset(answer["words"]), frozenset(answer["sought"]), answer["takes_tools"], answer["joins_arguments"]
        )

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if len(request["template"].encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise ChatError(f"the chat template has more than {MAX_TEMPLATE_BYTES} bytes")
        line = json.dumps(request).encode() + b"\n"
        if len(line) > MAX_REQUEST_BYTES:
            raise ChatError(f"the conversation has {len(line)} bytes as JSON; the limit is {MAX_REQUEST_BYTES}")
        with self._lock:
            answer = self._exchange(self._running(), line, self._seconds)
        if answer is None:
            raise ChatError(f"the chat template was stopped: it crashed, or took longer than {self._seconds:g} seconds")
        if "error" in answer:
            raise ChatError(answer["error"])
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            limits = [str(self._seconds), str(MAX_RENDERED_BYTES), str(MAX_MEMORY), MARK]
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), *limits],  # -P: the modules beside it are not for it
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on a terminal is not for it
            )
            if self._exchange(self._process, b"", START_SECONDS) is None:
                raise ChatError("the process that renders chat templates does not start (is jinja2 installed?)")
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, Any] | None:
        """The answer to a line; None, and the process is gone, when there is none in time."""
        assert process.stdin and process.stdout
        watchdog = Timer(seconds, process.kill)
        watchdog.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(MAX_ANSWER_BYTES)
        except BrokenPipeError:
            answer = b""
        except BaseException:  # Ctrl-C: the rest of the answer would be taken for the next one's
            self._end()
            raise
        finally:
            watchdog.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self._end()
        return None

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # what it had not read
                if pipe:
                    pipe.close()
        self._process = None
