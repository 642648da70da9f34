"""Parts of an answer, and the type of the parsers that find them."""

from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Head of a function call, before its Arguments.

    `index` numbers the calls of the answer from 0.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Piece of the arguments of the call with this index.

    All pieces of a call make the JSON text of an object, in the order in which they come.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class FoundCall:
    """Complete call as a format's parser finds it, before AnswerParser gives it an index and an id.

    `arguments` is JSON text of an object. `id` is the one that the model wrote; empty where the
    format has none.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class BegunCall:
    """Head of a call that is told while it is written; pieces of its arguments follow.

    `id` is as in FoundCall.
    """

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """Piece of the arguments of the call that began last."""

    text: str


Part = Content | Reasoning | Call | Arguments
Found = Content | Reasoning | FoundCall | BegunCall | MoreArguments
# A parser, or a part of one, that returns T. It yields what it finds, and None while it waits for
# more text.
type Parse[T] = Generator[Found | None, None, T]
