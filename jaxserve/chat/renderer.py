"""Rendering of chat templates in a separate process, which can be killed."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.chat.errors import RefusedByTemplateError
from jaxserve.errors import ChatError
from jaxserve.sandbox_process import LineProcess
from jaxserve.tokenizer import MARK

WORKER = Path(__file__).with_name("worker.py")
MAX_TEMPLATE_BYTES = 256 * 1024
MAX_REQUEST_BYTES = 32 * 2**20  # messages and variables, as JSON
MAX_RENDERED_BYTES = 16 * 2**20
MAX_MEMORY = 512 * 2**20
SECONDS = 5.0  # for one rendering
# A character in JSON is up to six times as long as in UTF-8.
MAX_ANSWER_BYTES = 6 * MAX_RENDERED_BYTES + 1024


@dataclass(frozen=True)
class Look:
    """Facts about a template's code.

    `words` are the strings in it, `attributes` the names behind a dot, `variables` the names that
    it reads without setting them before, `sought` the strings that it compares or gives to a
    method. `takes_tools` says that it uses the variable `tools`,
    `joins_arguments` that it adds a call's arguments to a text, so that they must be text and not
    an object.
    """

    words: frozenset[str]
    attributes: frozenset[str]
    variables: frozenset[str]
    sought: frozenset[str]
    takes_tools: bool
    joins_arguments: bool


class TemplateRenderer:
    """Renderer of any templates, one after the other; for use from several threads.

    The process starts with the first call, and again after it has died. Every failure is a
    ChatError.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        limits = [str(seconds), str(MAX_RENDERED_BYTES), str(MAX_MEMORY), MARK]
        # -P keeps the worker's folder off its module path: messages.py and so on are there.
        command = [sys.executable, "-P", str(WORKER), *limits]
        self._process = LineProcess(command, seconds, MAX_ANSWER_BYTES)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text that a template makes of its variables, which are plain JSON values."""
        return self._ask({"template": template, "variables": variables})["text"]

    def look(self, template: str) -> Look:
        """Return facts about a template's code, without rendering it."""
        answer = self._ask({"template": template})
        return Look(
            frozenset(answer["words"]),
            frozenset(answer["attributes"]),
            frozenset(answer["variables"]),
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
        line = json.dumps(request)  # ASCII, so that characters are bytes
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
                "the chat template was stopped: it crashed, or took longer than "
                f"{self._seconds:g} seconds"
            )
        if "error" in answer:
            kind = RefusedByTemplateError if answer["refused"] else ChatError
            raise kind(answer["error"])
        return answer
