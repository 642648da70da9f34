"""Turn input items into the messages of a conversation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.chat.answers.json_text import parse
from jaxserve.chat.bounds import MAX_MESSAGES
from jaxserve.chat.earlier_thoughts import GIVEN as THOUGHT
from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.chat.turns import BETWEEN
from jaxserve.errors import RequestError
from jaxserve.server.http.agents.conversation import Conversation
from jaxserve.server.http.agents.listed import Listed, Notes, json_of, named_type, parsed
from jaxserve.server.http.agents.responses.custom_tools import INPUT
from jaxserve.server.http.agents.responses.item_types import (
    OTHER_ITEMS,
    CallOutput,
    CustomCall,
    FunctionCall,
    Item,
    Message,
    ReasoningItem,
    Refusal,
    TextPart,
)
from jaxserve.server.http.agents.responses.response import new_id
from jaxserve.server.http.agents.responses.tools import name_shown
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.server.security.seals import SealError, Seals

MESSAGE = "message"  # type of an item; that of items without one
TEXTS = frozenset({"input_text", "output_text", "text"})
REFUSAL = "refusal"
UNOPENED = "input.encrypted_content"  # name of a seal of another key
LONGEST_ID = 64  # of an item: longer ones get another


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
    """Reader of input items, as messages in `found`.

    What the assistant thought, said and called one after the other is one message, as chat
    templates have it. `items` has what was read of each item, with an id of its own.

    Args:
        notes: Taker of what is ignored.
        seals: Seals of thoughts that were encrypted here.
    """

    def __init__(self, notes: Notes, seals: Seals):
        self.found = Conversation()
        self.items: list[dict[str, Any]] = []
        self._notes = notes
        self._seals = seals
        self._called = set[str]()  # ids of calls
        self._ids = set[str]()  # of items

    def read(self, items: Sequence[Any], path: Callable[[int], str]) -> None:
        """Add items; RequestError names the path of what is wrong.

        Args:
            path: Function that returns the path of the item of an index.
        """
        for i, item in enumerate(items):
            self._item(item, path(i))

    def _item(self, given: Any, path: str) -> None:
        kind = named_type(given, path, MESSAGE)
        type_of_item = KINDS.get(kind)
        if type_of_item is None:
            why = "this server has made none" if kind in OTHER_ITEMS else "it is not known"
            problem = f"is {kind!r:.80}, which is not supported: {why} (send {', '.join(KINDS)})"
            raise UnsupportedError(f"{path}.type", problem)
        item = parsed(type_of_item, given, self._notes, path)
        match item:
            case Message():
                fields = self._message(item, path)
            case ReasoningItem():
                fields = self._reasoning(item, path)
            case FunctionCall():
                fields = self._function_call(item, path)
            case CustomCall():
                fields = self._custom_call(item, path)
            case CallOutput():
                fields = self._output(item, path)
            case _:
                raise AssertionError(f"no item of an input: {kind}")
        self.items.append({"type": kind, "id": self._id(item), **fields})

    def _id(self, item: Item) -> str:
        """Return the id of an item: its own, or a new one where it has none of its own."""
        id = item.id
        if not isinstance(id, str) or not 0 < len(id) <= LONGEST_ID or id in self._ids:
            id = new_id("item")
        self._ids.add(id)
        return id

    # ---- types of items

    def _message(self, item: Message, path: str) -> dict[str, Any]:
        text = self._text(item.content, f"{path}.content")
        if item.role == OF_THE_MODEL:
            turn = self._turn(path, has_more=True)
            turn["content"] = _joined(turn["content"], text)
        else:
            self.found.add({"role": item.role, "content": text}, path)
        kind = "output_text" if item.role == OF_THE_MODEL else "input_text"
        return {"role": item.role, "content": [{"type": kind, "text": text}]}

    def _reasoning(self, item: ReasoningItem, path: str) -> dict[str, Any]:
        thought = self._thought(item, path)
        if thought:
            turn = self._turn(path, has_more=True)
            turn[THOUGHT] = _joined(turn.get(THOUGHT, ""), thought)
        if item.encrypted_content:
            return {"summary": [], "encrypted_content": item.encrypted_content}
        return {"summary": [], "content": [{"type": "reasoning_text", "text": thought}]}

    def _function_call(self, item: FunctionCall, path: str) -> dict[str, Any]:
        _check_arguments(item.arguments, f"{path}.arguments")
        self._call(item, item.arguments, path)
        return _call_fields(item) | {"arguments": item.arguments}

    def _custom_call(self, item: CustomCall, path: str) -> dict[str, Any]:
        self._call(item, json_of({INPUT: item.input}), path)
        return _call_fields(item) | {"input": item.input}

    def _call(self, item: FunctionCall | CustomCall, arguments: str, path: str) -> None:
        function = {"name": name_shown(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._turn(path).setdefault("tool_calls", []).append(call)
        self._called.add(item.call_id)

    def _output(self, item: CallOutput, path: str) -> dict[str, Any]:
        if item.call_id not in self._called:
            problem = f"is {item.call_id!r:.80}, which is the id of no call before it"
            raise RequestError(f"{path}.call_id", problem)
        text = self._text(item.output, f"{path}.output")
        self.found.add({"role": "tool", "tool_call_id": item.call_id, "content": text}, path)
        return {"call_id": item.call_id, "output": text}

    def _turn(self, path: str, has_more: bool = False) -> dict[str, Any]:
        """Return the assistant's message that an item belongs to: the last one, or a new one.

        Args:
            has_more: Whether the last one has to have more than a text: two texts one after the
                other are two messages.
        """
        last = self.found.messages[-1] if self.found.messages else {}
        is_text_alone = last.keys() == {"role", "content"} and bool(last.get("content"))
        if last.get("role") != OF_THE_MODEL or (has_more and is_text_alone):
            last = {"role": OF_THE_MODEL, "content": ""}
            self.found.add(last, path)
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
        """Return the text of a thought, from the seal if there is one that can be opened.

        Beside a seal of another key, of this server before it restarted or of another provider, the
        text counts.
        """
        name = "content" if item.content else "summary"
        texts = getattr(item, name) or []
        if item.encrypted_content:
            try:
                return self._seals.open(item.encrypted_content)
            except SealError as error:
                if not error.other_key or not texts:
                    raise RequestError(f"{path}.encrypted_content", str(error)) from None
                self._notes.add(UNOPENED)
        if not isinstance(texts, list):
            raise RequestError(f"{path}.{name}", f"is {texts!r:.80}; it must be a list of texts")
        return "".join(self._thought_part(t, f"{path}.{name}[{i}]") for i, t in enumerate(texts))

    def _thought_part(self, part: Any, path: str) -> str:
        named_type(part, path)
        return parsed(TextPart, part, self._notes, path).text


# Types of items that are read.
KINDS: Mapping[str, type[Listed]] = {
    MESSAGE: Message,
    "reasoning": ReasoningItem,
    "function_call": FunctionCall,
    "custom_tool_call": CustomCall,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
}


def _joined(before: str, text: str) -> str:
    """Return two texts of one message with an empty line between them."""
    return BETWEEN.join(each for each in (before, text) if each)


def _call_fields(item: FunctionCall | CustomCall) -> dict[str, str]:
    fields = {"call_id": item.call_id, "name": item.name}
    return fields | ({"namespace": item.namespace} if item.namespace else {})


def _check_arguments(text: str, path: str) -> None:
    """Raise RequestError unless the text, if there is any, is an object in JSON."""
    try:
        found = parse(text or "{}")
    except ValueError as error:
        raise RequestError(path, f"is not the JSON text of an object: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(path, f"is {text!r:.80}; give the JSON text of an object")
