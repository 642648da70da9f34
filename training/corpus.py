"""The corpus of the bundled models: plain stories and sums, and chats, all from a seed.

A hash of its text puts a document in the train or the held-out split, so that no text is in both.
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
HELD_OUT_PART: Final = 20  # one text in this many is held out


@dataclass(frozen=True)
class Turn:
    """A text and who says it: "system", "user" or "assistant", or "" outside of chats."""

    role: str
    text: str


@dataclass(frozen=True)
class Document:
    """A single turn without a role, or the turns of a chat."""

    kind: str
    turns: tuple[Turn, ...]

    @property
    def held_out(self) -> bool:
        """True if the document belongs to the held-out split."""
        joined = "\0".join(f"{turn.role}\n{turn.text}" for turn in self.turns)
        return zlib.crc32(joined.encode()) % HELD_OUT_PART == 0


def plain(text: str) -> tuple[Turn, ...]:
    """Return the turn of a text outside of chats."""
    return (Turn("", text),)


def chat(writer: Writer, exchanges: list[Exchange]) -> tuple[Turn, ...]:
    """Return exchanges as turns, some of them after a system prompt."""
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
    """Return a function that writes a chat about the topic."""
    return lambda writer: chat(writer, topic(writer))


# Kind of document -> its share in percent, and the function that writes it.
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
    """Write a document of a kind in KINDS, or a LONG chat of eleven to seventeen topics."""
    if kind == LONG:
        return Document(kind, chat(writer, chats.converse(writer, writer.rng.randint(11, 17))))
    return Document(kind, KINDS[kind][1](writer))


def documents(seed: int, split: str, count: int, kind: str | None = None) -> Iterator[Document]:
    """Yield `count` documents of the split "train" or "held-out".

    They are of one kind or, if it is None, of all KINDS in their shares. A document depends on
    (seed, split, kind, index) alone, so that a longer corpus begins with a shorter one.
    """
    open_writer = chats.open_writer()
    shares = [share for share, _ in KINDS.values()]
    for index in range(count):
        rng = random.Random(f"{seed}/{split}/{kind}/{index}")
        writer = open_writer(rng)
        chosen = kind or rng.choices(list(KINDS), shares)[0]
        document = draw(writer, chosen)
        while document.held_out != (split == "held-out"):
            document = draw(writer, chosen)
        yield document
