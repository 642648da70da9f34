"""Output items while they grow: the events that tell of them, and what they are at last."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from jaxserve.chat.answers import Call
from jaxserve.server.http.agents.responses.custom_tools import INPUT
from jaxserve.server.http.agents.responses.response import new_id
from jaxserve.server.http.agents.responses.tools import Origin

# Type of an event, and its fields beside those of every event.
Told = tuple[str, dict[str, Any]]


class OpenItem(Protocol):
    """An output item that is not complete."""

    id: str

    def begun(self) -> Mapping[str, Any]:
        """Return the item before its first text."""
        ...

    def opening(self) -> Iterator[Told]:
        """Yield the events before its first text."""
        ...

    def add(self, text: str) -> Iterator[Told]:
        """Yield the events of more text."""
        ...

    def closing(self) -> Iterator[Told]:
        """Yield the events behind its last text."""
        ...

    def whole(self, status: str) -> Mapping[str, Any]:
        """Return the item as it is at last."""
        ...


class _TextItem:
    """Item with one content part, a text; subclasses name its types."""

    prefix: str  # of ids
    part_type: str
    event: str  # between "response." and ".delta"

    def __init__(self) -> None:
        self.id = new_id(self.prefix)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(self._texts)

    def part(self, text: str) -> dict[str, Any]:
        """Return the content part with a text."""
        return {"type": self.part_type, "text": text}

    def opening(self) -> Iterator[Told]:
        yield "response.content_part.added", {"content_index": 0, "part": self.part("")}

    def add(self, text: str) -> Iterator[Told]:
        self._texts.append(text)
        yield f"response.{self.event}.delta", {"content_index": 0, "delta": text} | self.more()

    def closing(self) -> Iterator[Told]:
        text = self.text
        yield f"response.{self.event}.done", {"content_index": 0, "text": text} | self.more()
        yield "response.content_part.done", {"content_index": 0, "part": self.part(text)}

    def more(self) -> dict[str, Any]:
        """Return the further fields of events with text."""
        return {}


class MessageItem(_TextItem):
    """Text of the answer proper."""

    prefix = "msg"
    part_type = "output_text"
    event = "output_text"

    def begun(self) -> Mapping[str, Any]:
        return self._item("in_progress", [])

    def part(self, text: str) -> dict[str, Any]:
        return {"type": self.part_type, "text": text, "annotations": [], "logprobs": []}

    def more(self) -> dict[str, Any]:
        return {"logprobs": []}

    def whole(self, status: str) -> Mapping[str, Any]:
        return self._item(status, [self.part(self.text)])

    def _item(self, status: str, content: list[dict[str, Any]]) -> Mapping[str, Any]:
        fields = {"status": status, "role": "assistant", "content": content}
        return {"type": "message", "id": self.id} | fields


class ReasoningItem(_TextItem):
    """Thought before the answer proper.

    Args:
        seal: Function that encrypts the thought for the client to keep; None where it does not ask.
    """

    prefix = "rs"
    part_type = "reasoning_text"
    event = "reasoning_text"

    def __init__(self, seal: Callable[[str], str] | None = None):
        super().__init__()
        self._seal = seal

    def begun(self) -> Mapping[str, Any]:
        return self._item("in_progress", [], None)

    def whole(self, status: str) -> Mapping[str, Any]:
        text = self.text
        encrypted = self._seal(text) if self._seal else None
        return self._item(status, [self.part(text)], encrypted)

    def _item(
        self, status: str, content: list[dict[str, Any]], encrypted: str | None
    ) -> Mapping[str, Any]:
        fields = {"summary": [], "content": content, "encrypted_content": encrypted}
        return {"type": "reasoning", "id": self.id, "status": status} | fields


class _CallItem:
    """Item of a call, which has no content parts; subclasses say how its arguments are told."""

    prefix: str  # of ids

    def __init__(self, call: Call, origin: Origin):
        self.id = new_id(self.prefix)
        self._call_id = call.id
        self._origin = origin
        self._texts: list[str] = []

    @property
    def arguments(self) -> str:
        """Arguments so far, as JSON text."""
        return "".join(self._texts)

    def opening(self) -> Iterator[Told]:
        yield from ()

    def _item(self, status: str, **fields: str) -> Mapping[str, Any]:
        """Return the item with the fields in which the classes differ, the first of them its type.

        A tool of a namespace has the name of that beside its own.
        """
        origin = self._origin
        head = {"type": fields.pop("type"), "id": self.id, "status": status}
        call = {"call_id": self._call_id, "name": origin.name, **fields}
        return head | call | ({"namespace": origin.namespace} if origin.namespace else {})


class FunctionItem(_CallItem):
    """Call of a function."""

    prefix = "fc"

    def begun(self) -> Mapping[str, Any]:
        return self._item("in_progress", type="function_call", arguments="")

    def add(self, text: str) -> Iterator[Told]:
        self._texts.append(text)
        yield "response.function_call_arguments.delta", {"delta": text}

    def closing(self) -> Iterator[Told]:
        fields = {"name": self._origin.name, "arguments": self.arguments}
        yield "response.function_call_arguments.done", fields

    def whole(self, status: str) -> Mapping[str, Any]:
        return self._item(status, type="function_call", arguments=self.arguments)


class CustomItem(_CallItem):
    """Call of a custom tool, whose input is the one argument of its function.

    The input is told at the end: before that it is JSON text, in which characters are escaped.
    """

    prefix = "ctc"

    def begun(self) -> Mapping[str, Any]:
        return self._item("in_progress", type="custom_tool_call", input="")

    def add(self, text: str) -> Iterator[Told]:
        self._texts.append(text)
        yield from ()

    def closing(self) -> Iterator[Told]:
        text = self._input()
        yield "response.custom_tool_call_input.delta", {"delta": text}
        yield "response.custom_tool_call_input.done", {"input": text}

    def whole(self, status: str) -> Mapping[str, Any]:
        return self._item(status, type="custom_tool_call", input=self._input())

    def _input(self) -> str:
        """Return the tool's input; arguments that a model writes otherwise are given as JSON."""
        arguments = self.arguments
        try:
            found = json.loads(arguments)
        except ValueError:  # the answer was cut inside of them
            return arguments
        given = found.get(INPUT) if isinstance(found, dict) and len(found) == 1 else None
        return given if isinstance(given, str) else arguments
