"""Turn input items into the messages of a conversation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxserve.chat.answers.json_text import parse
from jaxserve.chat.bounds import MAX_MESSAGES
from jaxserve.errors import RequestError
from jaxserve.server.http.agents.listed import Listed, Notes, json_of, named_type, parsed
from jaxserve.server.http.agents.responses.tools import INPUT, name_shown
from jaxserve.server.http.agents.responses.types import (
    OTHER_ITEMS,
    CallOutput,
    CustomCall,
    FunctionCall,
    Message,
    ReasoningItem,
    Refusal,
    TextPart,
)
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.server.security.seals import SealError, Seals

MESSAGE = "message"  # type of an item; that of items without one
THOUGHT = "reasoning_content"  # key of an earlier thought in a message
TEXTS = frozenset({"input_text", "output_text", "text"})
REFUSAL = "refusal"


@dataclass
class Conversation:
    """Messages of a conversation, each with the path in the request of where it begins."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)


def items_of(given: Any, path: str) -> list[Any]:
    """Return the items of an input, which may be a text; RequestError for anything else."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RequestError(path, f"is {given!r:.80}; it must be a string or a list of items")
    if len(given) > MAX_MESSAGES:
        raise RequestError(path, f"has {len(given)} items; the limit is {MAX_MESSAGES}")
    return given


class ItemReader:
    """Reader of input items.

    What the assistant thought, said and called one after the other is one message, as chat
    templates have it.

    Args:
        notes: Taker of what is ignored.
        seals: Seals of thoughts that were encrypted here.
    """

    def __init__(self, notes: Notes, seals: Seals):
        self._notes = notes
        self._seals = seals
        self._found = Conversation()
        self._called = set[str]()  # ids of calls
        self._kinds: Mapping[str, tuple[type[Listed], Callable[[Any, str], None]]] = (
            MappingProxyType(
                {
                    MESSAGE: (Message, self._message),
                    "reasoning": (ReasoningItem, self._reasoning),
                    "function_call": (FunctionCall, self._function_call),
                    "custom_tool_call": (CustomCall, self._custom_call),
                    "function_call_output": (CallOutput, self._output),
                    "custom_tool_call_output": (CallOutput, self._output),
                }
            )
        )

    def read(self, instructions: str | None, items: Sequence[tuple[str, Any]]) -> Conversation:
        """Return the conversation; RequestError names the path of what is wrong.

        Args:
            items: Each item with its path in the request.
        """
        if instructions is not None:
            self._found.add({"role": "system", "content": instructions}, "instructions")
        for path, item in items:
            self._item(item, path)
        return self._found

    def _item(self, item: Any, path: str) -> None:
        kind = named_type(item, path, MESSAGE)
        if kind not in self._kinds:
            known = "this server made none and cannot use it" if kind in OTHER_ITEMS else "unknown"
            accepted = ", ".join(self._kinds)
            raise UnsupportedError(
                f"{path}.type", f"is {kind!r:.80}, which is not supported: {known} (of {accepted})"
            )
        type, take = self._kinds[kind]
        take(parsed(type, item, self._notes, path), path)

    # ---- types of items

    def _message(self, item: Message, path: str) -> None:
        text = self._text(item.content, f"{path}.content")
        if item.role != "assistant":
            return self._found.add({"role": item.role, "content": text}, path)
        self._turn(path, _is_unsaid)["content"] = text

    def _reasoning(self, item: ReasoningItem, path: str) -> None:
        thought = self._thought(item, path)
        if not thought:
            return
        turn = self._turn(
            path, lambda turn: turn.keys() == {"role", "content"} and not turn["content"]
        )
        turn[THOUGHT] = thought

    def _function_call(self, item: FunctionCall, path: str) -> None:
        _check_arguments(item.arguments, f"{path}.arguments")
        name = name_shown(item.name, item.namespace)
        self._call(name, item.arguments, item.call_id, path)

    def _custom_call(self, item: CustomCall, path: str) -> None:
        name = name_shown(item.name, item.namespace)
        self._call(name, json_of({INPUT: item.input}), item.call_id, path)

    def _call(self, name: str, arguments: str, id: str, path: str) -> None:
        turn = self._turn(path, lambda turn: True)
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append(
            {"id": id, "type": "function", "function": function}
        )
        self._called.add(id)

    def _output(self, item: CallOutput, path: str) -> None:
        if item.call_id not in self._called:
            problem = f"is {item.call_id!r:.80}, which is the id of no call before it"
            raise RequestError(f"{path}.call_id", problem)
        text = self._text(item.output, f"{path}.output")
        self._found.add({"role": "tool", "tool_call_id": item.call_id, "content": text}, path)

    def _turn(self, path: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the assistant's message that an item belongs to: the last one, or a new one."""
        last = self._found.messages[-1] if self._found.messages else {}
        if last.get("role") != "assistant" or not fits(last):
            last = {"role": "assistant", "content": ""}
            self._found.add(last, path)
        return last

    # ---- texts

    def _text(self, content: Any, path: str) -> str:
        """Return the text of a content, which is a string or a list of parts."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise RequestError(path, f"is {content!r:.80}; it must be a string or a list of parts")
        return "".join(self._part(part, f"{path}[{i}]") for i, part in enumerate(content))

    def _part(self, part: Any, path: str) -> str:
        kind = named_type(part, path)
        if kind in TEXTS:
            return parsed(TextPart, part, self._notes, path).text
        if kind == REFUSAL:
            return parsed(Refusal, part, self._notes, path).refusal
        raise UnsupportedError(f"{path}.type", f"is {kind!r:.80}; only text is supported")

    def _thought(self, item: ReasoningItem, path: str) -> str:
        """Return the text of a thought, from the seal if there is one that can be opened."""
        if item.encrypted_content:
            try:
                return self._seals.open(item.encrypted_content)
            except SealError as error:
                # Without the key the text beside the seal is as good as one that was never sealed.
                if not error.other_key or not item.content:
                    raise RequestError(f"{path}.encrypted_content", str(error)) from None
                self._notes.add("input.encrypted_content")
        parts = item.content or item.summary or []
        if not isinstance(parts, list):
            raise RequestError(f"{path}.content", f"is {parts!r:.80}; it must be a list of texts")
        texts = [self._thought_part(part, f"{path}.content[{i}]") for i, part in enumerate(parts)]
        return "".join(texts)

    def _thought_part(self, part: Any, path: str) -> str:
        named_type(part, path)
        return parsed(TextPart, part, self._notes, path).text


def _check_arguments(text: str, path: str) -> None:
    """Raise RequestError unless the text, if there is any, is an object in JSON."""
    try:
        found = parse(text or "{}")
    except ValueError as error:
        raise RequestError(path, f"is not the JSON text of an object: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(path, f"is {text!r:.80}; give the JSON text of an object")


def _is_unsaid(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn of the assistant has a thought at most."""
    return not (turn["content"] or turn.get("tool_calls"))


def _is_empty(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn of the assistant has nothing yet."""
    return _is_unsaid(turn) and THOUGHT not in turn
