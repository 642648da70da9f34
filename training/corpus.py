"""The text the bundled models are trained on: plain stories and sums, and chats of every length,
all from a seed.

A document is in the train or the held-out split by a hash of its text, so that no text is in both.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from training import chats, stories, sums
from training.chats import Exchange, Writer

SYSTEM_SHARE: Final = 0.35  # chats that begin with a system prompt
HELD_OUT_PART: Final = 20  # one text in so many is held out


@dataclass(frozen=True)
class Turn:
    """Who speaks ("system", "user", "assistant") and what; role "" is a text outside of any
    chat."""

    role: str
    text: str


@dataclass(frozen=True)
class Document:
    """One text: a single turn without a role, or the turns of a chat."""

    kind: str
    turns: tuple[Turn, ...]

    @property
    def held_out(self) -> bool:
        joined = "\0".join(f"{turn.role}\n{turn.text}" for turn in self.turns)
        return zlib.crc32(joined.encode()) % HELD_OUT_PART == 0


def plain(text: str) -> tuple[Turn, ...]:
    return (Turn("", text),)


def chat(writer: Writer, exchanges: list[Exchange]) -> tuple[Turn, ...]:
    """The exchanges as turns, behind a system prompt in some."""
    roles = ("user", "assistant")
    turns = [
        Turn(role, text)
        for exchange in exchanges
        for role, text in zip(roles, exchange, strict=True)
    ]
    if writer.rng.random() < SYSTEM_SHARE:
        turns.insert(0, Turn("system", writer.line("system")))
    return tuple(turns)


def about(topic: Callable[[Writer], list[Exchange]]) -> Callable[[Writer], tuple[Turn, ...]]:
    return lambda writer: chat(writer, topic(writer))


# Every kind of document, how often it is drawn in a hundred, and what writes it.
KINDS: Final[Mapping[str, tuple[int, Callable[[Writer], tuple[Turn, ...]]]]] = MappingProxyType(
    {
        "story": (11, lambda writer: plain(stories.tell(writer.stories, writer.rng).text)),
        "sum sheet": (11, lambda writer: plain(sums.sheet(writer.rng))),
        "story chat": (10, about(chats.story)),
        "questions": (12, about(chats.questions)),
        "summary": (12, about(chats.summary)),
        "sums": (16, about(chats.sums_asked)),
        "json": (10, about(chats.json_records)),
        "facts": (4, about(chats.facts)),
        "small talk": (8, about(chats.small_talk)),
        "mixed chat": (
            6,
            lambda writer: chat(writer, chats.converse(writer, writer.rng.randint(2, 4))),
        ),
    }
)
LONG: Final = "long chat"


def draw(writer: Writer, kind: str) -> Document:
    """A document of a kind in KINDS, or a long chat: about fourteen topics in one conversation."""
    if kind == LONG:
        return Document(kind, chat(writer, chats.converse(writer, writer.rng.randint(11, 17))))
    return Document(kind, KINDS[kind][1](writer))


def documents(seed: int, split: str, count: int, kind: str | None = None) -> Iterator[Document]:
    """`count` documents of the split "train" or "held-out", of one kind or (None) of KINDS in their
    shares.

    Each depends on (seed, split, kind, index) alone: a longer corpus begins with a shorter one.
    """
    open_writer = chats.open_writer()
    shares = [share for share, _ in KINDS.values()]
    for index in range(count):
        rng = random.Random(f"{seed}/{split}/{kind}/{index}")
        writer = open_writer(rng)
        chosen = kind or rng.choices(list(KINDS), shares)[0]
        while (document := draw(writer, chosen)).held_out != (split == "held-out"):
            pass
        yield document
