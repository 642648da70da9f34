"""From the text of an answer to its parts: thought first, then calls in what is left."""

import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jaxserve.chat.answers.events import Arguments, Call, Content, Found, Part, Reasoning, Steps
from jaxserve.chat.answers.formats import ToolForm
from jaxserve.chat.answers.incremental import Incoming
from jaxserve.chat.answers.thinking import thinking

ID_LETTERS, ID_SIZE = string.ascii_letters + string.digits, 9  # what Mistral's templates insist on


@dataclass(frozen=True)
class Answer:
    """A whole one. calls: each with its arguments. content and reasoning are empty where there is
    none.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[Call, str], ...]


@dataclass(frozen=True)
class Reading:
    """How the answer to one prompt is to be read. By default all of it is content.

    tools: the form of calls; None: calls are content. names: of the functions that may be called; a
    call of another one is content. parallel: all calls of an answer; otherwise the first one, and
    the others are dropped. thinks: it may begin with a thought; opened: the prompt has begun it.
    spelled: special tokens that are text here.
    """

    tools: ToolForm | None = None
    names: frozenset[str] = frozenset()
    parallel: bool = True
    thinks: bool = False
    opened: bool = False
    spelled: Mapping[int, str] = field(default_factory=dict)

    def read(self, text: str) -> Answer:
        """The whole text of an answer."""
        parser = AnswerParser(self)
        parts = [*parser.feed(text), *parser.end()]
        arguments = {part.index: part.text for part in parts if isinstance(part, Arguments)}
        return Answer(
            content="".join(part.text for part in parts if isinstance(part, Content)),
            reasoning="".join(part.text for part in parts if isinstance(part, Reasoning)),
            calls=tuple((part, arguments[part.index]) for part in parts if isinstance(part, Call)),
        )


def ended_by(finish_reason: str, called: bool) -> str:
    """The reason that clients hear: an answer that stopped after it called something ends with its
    calls.
    """
    return "tool_calls" if called and finish_reason == "stop" else finish_reason


def new_call_id() -> str:
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_SIZE))


class AnswerParser:
    """The parts of an answer as its text comes; the same parts, joined, however the text is cut.

    A call is held back until it is whole and known to be one: text that only begins like a call is
    lost to nobody.
    """

    def __init__(self, reading: Reading, new_id: Callable[[], str] = new_call_id):
        """new_id: of calls."""
        self._thoughts = (
            _Stage(lambda text: thinking(text, reading.opened)) if reading.thinks else None
        )
        tools = reading.tools
        self._calls = _Stage(lambda text: tools.grammar(text, reading.names)) if tools else None
        self._parallel, self._new_id = reading.parallel, new_id
        self._called = 0

    @property
    def called(self) -> bool:
        """There was a call."""
        return self._called > 0

    def feed(self, text: str) -> list[Part]:
        """The parts that are settled with this piece of the text."""
        if not text:
            return []
        found = self._thoughts.feed(text) if self._thoughts else [Content(text)]
        return list(self._told(found))

    def end(self) -> list[Part]:
        """The rest, when no more text will come."""
        rest = self._told(self._thoughts.end()) if self._thoughts else ()
        return [*rest, *(self._numbered(self._calls.end()) if self._calls else ())]

    def _told(self, found: Iterable[Content | Reasoning | Found]) -> Iterator[Part]:
        for part in found:
            if isinstance(part, Content) and self._calls:
                yield from self._numbered(self._calls.feed(part.text))
            elif not isinstance(part, Found):
                yield part

    def _numbered(self, found: Iterable[Content | Reasoning | Found]) -> Iterator[Part]:
        for part in found:
            if not isinstance(part, Found):
                yield part
            elif self._parallel or not self._called:
                yield Call(self._called, self._new_id(), part.name)
                yield Arguments(self._called, part.arguments)
                self._called += 1


class _Stage:
    """A grammar that is fed."""

    def __init__(self, grammar: Callable[[Incoming], Steps[None]]):
        self._text = Incoming()
        self._steps = grammar(self._text)

    def feed(self, text: str) -> list[Content | Reasoning | Found]:
        self._text.add(text)
        return self._run()

    def end(self) -> list[Content | Reasoning | Found]:
        self._text.finish()
        return self._run()

    def _run(self) -> list[Content | Reasoning | Found]:
        found = []
        for part in self._steps:
            if part is None:
                break
            found.append(part)
        return found
