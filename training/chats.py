"""Chats by topic: what a user asks and what the assistant answers, question by question."""

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from training import records, stories, sums
from training.grammar import Grammar, Telling, read_grammar

TALK_FILE: Final = "talk.grammar"
type Exchange = tuple[str, str]  # what the user says, what the assistant answers


@dataclass(frozen=True)
class Writer:
    """Writes exchanges from two grammars and one source of chance."""

    stories: Grammar
    talk: Grammar
    rng: random.Random

    def said(self, rule: str) -> Exchange:
        return Telling(self.talk, self.rng).pair(rule)

    def line(self, rule: str) -> str:
        return Telling(self.talk, self.rng).text(f"{{{rule}}}")


def open_writer() -> Callable[[random.Random], Writer]:
    """Reads the grammars once; a writer for each source of chance."""
    return functools.partial(Writer, read_grammar(stories.FILE), read_grammar(TALK_FILE))


def story(writer: Writer) -> list[Exchange]:
    """A story that was asked for."""
    told = stories.tell(writer.stories, writer.rng)
    return [(told.request(), told.text)]


def questions(writer: Writer) -> list[Exchange]:
    """Two to four questions about a story that the assistant tells or the user brings along."""
    told = stories.tell(writer.stories, writer.rng)
    asked = list(dict.fromkeys(told.question() for _ in range(writer.rng.randint(2, 4))))
    if writer.rng.random() < 0.5:
        return [(told.request(), told.text), *asked]
    (first, answer), *others = asked
    return [(f"{writer.line('read')}\n{told.text}\n{first}", answer), *others]


def summary(writer: Writer) -> list[Exchange]:
    """A summary of a story that the assistant told or the user brings along."""
    told = stories.tell(writer.stories, writer.rng)
    if writer.rng.random() < 0.4:
        return [(told.request(), told.text), (writer.line("retell_told"), told.summary())]
    return [(f"{writer.line('retell')}\n{told.text}", told.summary())]


def sums_asked(writer: Writer) -> list[Exchange]:
    """Three to eight sums, one in eight of them a problem about things."""
    return [_sum(writer.rng) for _ in range(writer.rng.randint(3, 8))]


def _sum(rng: random.Random) -> Exchange:
    if rng.random() < 0.12:
        return sums.story_problem(rng)
    exercise = sums.draw(rng)
    return sums.question(exercise, rng), exercise.answer()


def json_records(writer: Writer) -> list[Exchange]:
    """One to three records."""
    drawn = [records.draw(writer.rng) for _ in range(writer.rng.randint(1, 3))]
    return [(record.request(writer.rng), record.answer()) for record in drawn]


def facts(writer: Writer) -> list[Exchange]:
    """Two to five questions about the world, one in five of them beyond a small model."""
    rules = (
        writer.rng.choice(("fact", "fact", "fact", "fact", "unknown"))
        for _ in range(writer.rng.randint(2, 5))
    )
    return [writer.said(rule) for rule in rules]


def small_talk(writer: Writer) -> list[Exchange]:
    """One to four remarks: greetings, questions about the model, jokes, thanks."""
    rules = ("hello", "self", "self", "self", "joke", "thanks", "unknown")
    return [writer.said(rule) for rule in writer.rng.sample(rules, writer.rng.randint(1, 4))]


# Topics with how often each is drawn; stories are long, so that fewer of them fill as much text.
TOPICS: Final[Mapping[Callable[[Writer], list[Exchange]], int]] = MappingProxyType(
    {story: 5, questions: 5, summary: 5, sums_asked: 8, json_records: 6, facts: 5, small_talk: 6}
)


def converse(writer: Writer, topics: int) -> list[Exchange]:
    """A chat about so many topics. In one of four the user gives a name and asks for it at the
    end."""
    drawn = writer.rng.choices(list(TOPICS), list(TOPICS.values()), k=topics)
    exchanges = [exchange for topic in drawn for exchange in topic(writer)]
    chance = writer.rng.random()
    if chance < 0.25:
        person = Telling(writer.talk, writer.rng)
        return [person.pair("named"), *exchanges, person.pair("recall")]
    return [
        *exchanges,
        writer.said("nameless" if chance < 0.35 else "thanks" if chance < 0.6 else "bye"),
    ]
