"""Chat templates rendered in a process of their own, which can be killed."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ChatError
from jaxserve.sandbox_process import LineProcess
from jaxserve.tokenizer import MARK

WORKER = Path(__file__).with_name("worker.py")
MAX_TEMPLATE_BYTES = 256 * 1024
MAX_REQUEST_BYTES = 32 * 2**20  # messages and variables, as JSON
MAX_RENDERED_BYTES = 16 * 2**20
MAX_MEMORY = 512 * 2**20
SECONDS = 5.0
MAX_ANSWER_BYTES = (
    6 * MAX_RENDERED_BYTES + 1024
)  # a letter in JSON is up to six times as long as in UTF-8


@dataclass(frozen=True)
class Look:
    """words: strings and names in a template's code. sought: those that it compares or gives to a
    method.

    takes_tools: it has a use for `tools`. joins_arguments: it adds a call's arguments to a text, so
    they must be one.
    """

    words: frozenset[str]
    sought: frozenset[str]
    takes_tools: bool
    joins_arguments: bool


class TemplateRenderer:
    """Renders any templates, one after the other; for use from several threads.

    The process starts with the first call, and again after it has died. Everything that goes wrong
    is a ChatError.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        limits = [str(seconds), str(MAX_RENDERED_BYTES), str(MAX_MEMORY), MARK]
        command = [
            sys.executable,
            "-P",
            str(WORKER),
            *limits,
        ]  # -P: the modules beside it are not for it
        self._process = LineProcess(command, seconds, MAX_ANSWER_BYTES)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that a template makes of its variables, which are plain JSON values."""
        return self._ask({"template": template, "variables": variables})["text"]

    def look(self, template: str) -> Look:
        """What a template's code says."""
        answer = self._ask({"template": template})
        return Look(
            frozenset(answer["words"]),
            frozenset(answer["sought"]),
            answer["takes_tools"],
            answer["joins_arguments"],
        )

    def close(self) -> None:
        """End the process; a later call starts another."""
        self._process.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if len(request["template"].encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise ChatError(f"the chat template has more than {MAX_TEMPLATE_BYTES} bytes")
        line = json.dumps(request)  # in ASCII
        if len(line) > MAX_REQUEST_BYTES:
            raise ChatError(
                f"the conversation has {len(line)} bytes as JSON; the limit is {MAX_REQUEST_BYTES}"
            )
        try:
            answer = self._process.ask(line)
        except ChildProcessError:
            raise ChatError(
                "the process that renders chat templates does not start (is jinja2 installed?)"
            ) from None
        if answer is None:
            raise ChatError(
                f"the chat template was stopped: it crashed, or took longer than "
                f"{self._seconds:g} seconds"
            )
        if "error" in answer:
            raise ChatError(answer["error"])
        return answer
