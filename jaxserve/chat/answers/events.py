"""What an answer is made of."""

from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """What the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What it thinks before."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function is called; its arguments follow. index: among the calls of the answer, from 0
    on."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Of the call with this index: JSON text, an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """A call as a grammar finds it: numbers and ids are not its business. arguments: JSON text, an
    object.
    """

    name: str
    arguments: str


Part = Content | Reasoning | Call | Arguments
type Steps[T] = Generator[
    Content | Reasoning | Found | None, None, T
]  # of a grammar; None: it waits for more text
