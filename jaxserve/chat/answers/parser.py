"""The parser of answers: reasoning first, then calls in the text that is left."""

import math
import secrets
import string
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.chat.answers.events import (
    Arguments,
    BegunCall,
    Call,
    Content,
    Found,
    FoundCall,
    MoreArguments,
    Parse,
    Part,
    Reasoning,
)
from jaxserve.chat.answers.formats import ToolFormat
from jaxserve.chat.answers.harmony import harmony
from jaxserve.chat.answers.incremental import IncomingText
from jaxserve.chat.answers.thinking import thinking

# Mistral's templates refuse ids of any other kind.
ID_LETTERS = string.ascii_letters + string.digits
ID_SIZE = 9


@dataclass(frozen=True)
class Answer:
    """Parts of a complete answer.

    `calls` pairs each call with its arguments as JSON text, which is incomplete where the answer
    was cut inside of a call that is certain, see Reading. `content` and `reasoning` are empty where
    there is none.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[Call, str], ...]


@dataclass(frozen=True)
class Reading:
    """Rules for parsing the answer to one prompt; by default all of it is content.

    `tools` is the format of calls, or None where calls are content. `functions` maps the functions
    that may be called to the JSON schemas of their parameters; a call of another one is content.
    Without `parallel` the first call of an answer is kept and the others are dropped. `thinks` says
    that the answer may begin with reasoning, `opened` that the prompt has begun it. `channels` says
    that the answer is in Harmony, whatever `tools` is; without `thinks` its thoughts are content.
    `spelled` maps special tokens that belong to the text, such as the marks of calls, from their
    ids to their spelling. `certain` says that calls behind the reasoning are well-formed, as a
    grammar sees to that, so that they are told before they are complete.
    """

    tools: ToolFormat | None = None
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    thinks: bool = False
    opened: bool = False
    channels: bool = False
    spelled: Mapping[int, str] = field(default_factory=dict)
    certain: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions that may be called."""
        return frozenset(self.functions)

    @property
    def certain_calls(self) -> float:
        """Number of calls that are told before they are complete.

        Without `parallel` it is the first one: text behind that is free to look like a call.
        """
        if not self.certain:
            return 0
        return math.inf if self.parallel else 1

    def read(self, text: str) -> Answer:
        """Parse the complete text of an answer."""
        parser = AnswerParser(self)
        parts = [*parser.feed(text), *parser.end()]
        arguments: dict[int, list[str]] = defaultdict(list)
        for part in parts:
            if isinstance(part, Arguments):
                arguments[part.index].append(part.text)
        return Answer(
            content="".join(part.text for part in parts if isinstance(part, Content)),
            reasoning="".join(part.text for part in parts if isinstance(part, Reasoning)),
            calls=tuple(
                (part, "".join(arguments[part.index])) for part in parts if isinstance(part, Call)
            ),
        )


def ended_by(finish_reason: str, called: bool) -> str:
    """Return the reason for clients: "tool_calls" for an answer that stopped after a call."""
    return "tool_calls" if called and finish_reason == "stop" else finish_reason


def new_call_id() -> str:
    """Return a random id."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_SIZE))


class AnswerParser:
    """Parser of one answer whose text arrives in pieces.

    However the text is cut, the joined parts are the same. A call is held back until it is complete
    and well-formed: text that only begins like a call becomes content. A call that is certain comes
    in pieces while it is written, see Reading: the last one is as incomplete as the answer.
    """

    def __init__(self, reading: Reading, new_id: Callable[[], str] = new_call_id):
        """Start at the beginning of an answer; `new_id` makes the ids of calls."""
        tools = reading.tools
        self._thoughts: _Stage | None = None
        if reading.thinks and not reading.channels:
            self._thoughts = _Stage(lambda text: thinking(text, reading.opened))
        self._calls: _Stage | None = None
        if reading.channels:
            thoughts = Reasoning if reading.thinks else Content
            self._calls = _Stage(
                lambda text: harmony(text, reading.functions, thoughts), reading.certain_calls
            )
        elif tools:
            self._calls = _Stage(
                lambda text: tools.parse(text, reading.functions), reading.certain_calls
            )
        self._parallel = reading.parallel
        self._new_id = new_id
        self._called = 0
        self._keeps = True  # the call that began last, and so its arguments
        self._ids = set[str]()

    @property
    def called(self) -> bool:
        """Return whether the text so far has a call."""
        return self._called > 0

    def feed(self, text: str) -> list[Part]:
        """Add a piece of the text and return the parts that are settled with it."""
        if not text:
            return []
        found = self._thoughts.feed(text) if self._thoughts else [Content(text)]
        return list(self._parts(found))

    def end(self) -> list[Part]:
        """Return the remaining parts, when no more text will come."""
        rest: list[Part] = []
        if self._thoughts:
            rest += self._parts(self._thoughts.end())
        if self._calls:
            rest += self._numbered(self._calls.end())
        return rest

    def _parts(self, found: Iterable[Found]) -> Iterator[Part]:
        """Search the content that the first stage found for calls; pass on its reasoning."""
        for part in found:
            if isinstance(part, Content) and self._calls:
                yield from self._numbered(self._calls.feed(part.text))
            elif isinstance(part, Content | Reasoning):
                yield part

    def _numbered(self, found: Iterable[Found]) -> Iterator[Part]:
        """Give calls their index and id; drop all but the first one unless they are parallel.

        An id that the model wrote is kept, for templates that write it into the history again.
        """
        for part in found:
            match part:
                case Content() | Reasoning():
                    yield part
                case BegunCall():
                    yield from self._begin(part)
                case MoreArguments():
                    yield from self._add(part.text)
                case FoundCall():
                    yield from self._begin(part)
                    yield from self._add(part.arguments)

    def _begin(self, call: FoundCall | BegunCall) -> Iterator[Part]:
        """Yield the head of a call, unless the call is dropped."""
        self._keeps = self._parallel or not self._called
        if self._keeps:
            yield Call(self._called, self._id_of(call), call.name)
            self._called += 1

    def _add(self, arguments: str) -> Iterator[Part]:
        """Yield a piece of the arguments of the call that began last, unless it is dropped."""
        if self._keeps:
            yield Arguments(self._called - 1, arguments)

    def _id_of(self, call: FoundCall | BegunCall) -> str:
        """Return the id of a call; a new one where the model wrote none, or one a second time."""
        id = call.id if call.id and call.id not in self._ids else self._new_id()
        self._ids.add(id)
        return id


class _Stage:
    """A running parse function and the text that it reads, see IncomingText."""

    def __init__(self, parse: Callable[[IncomingText], Parse[None]], certain_calls: float = 0):
        self._text = IncomingText(certain_calls)
        self._parse = parse(self._text)

    def feed(self, text: str) -> list[Found]:
        """Add text and return what it settles."""
        self._text.add(text)
        return self._run()

    def end(self) -> list[Found]:
        """Return the rest, when no more text will come."""
        self._text.finish()
        return self._run()

    def _run(self) -> list[Found]:
        """Run the parse function until it waits for more text, or ends."""
        found = []
        for part in self._parse:
            if part is None:
                break
            found.append(part)
        return found
