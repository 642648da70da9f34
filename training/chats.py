"""Writes chats by topic: exchanges of a user's question and the assistant's answer."""

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from training import records, stories, sums
from training.grammar import Grammar, Telling, read_grammar

TALK_FILE: Final = "talk.grammar"
type Exchange = tuple[str, str]  # the user's text, the assistant's answer


@dataclass(frozen=True)
class Writer:
    """Writer of exchanges from two grammars and one random generator."""

    stories: Grammar
    talk: Grammar
    rng: random.Random

    def exchange(self, rule: str) -> Exchange:
        """Write an exchange by a rule of the talk grammar."""
        return Telling(self.talk, self.rng).pair(rule)

    def line(self, rule: str) -> str:
        """Write a line by a rule of the talk grammar."""
        return Telling(self.talk, self.rng).text(f"{{{rule}}}")


def open_writer() -> Callable[[random.Random], Writer]:
    """Read the grammars once; return a function that makes a writer from a random generator."""
    return functools.partial(Writer, read_grammar(stories.FILE), read_grammar(TALK_FILE))


def story(writer: Writer) -> list[Exchange]:
    """Write a request for a story, and the story."""
    told = stories.tell(writer.stories, writer.rng)
    return [(told.request(), told.text)]


def questions(writer: Writer) -> list[Exchange]:
    """Write two to four questions about a story that the assistant tells or the user gives."""
    told = stories.tell(writer.stories, writer.rng)
    asked = list(dict.fromkeys(told.question() for _ in range(writer.rng.randint(2, 4))))
    if writer.rng.random() < 0.5:
        return [(told.request(), told.text), *asked]
    (first, answer), *others = asked
    return [(f"{writer.line('read')}\n{told.text}\n{first}", answer), *others]


def summary(writer: Writer) -> list[Exchange]:
    """Write a summary of a story that the assistant told or the user gives."""
    told = stories.tell(writer.stories, writer.rng)
    if writer.rng.random() < 0.4:
        return [(told.request(), told.text), (writer.line("retell_told"), told.summary())]
    return [(f"{writer.line('retell')}\n{told.text}", told.summary())]


def sums_asked(writer: Writer) -> list[Exchange]:
    """Write three to eight sums, about one in eight of them a problem about things."""
    return [_sum(writer.rng) for _ in range(writer.rng.randint(3, 8))]


def _sum(rng: random.Random) -> Exchange:
    if rng.random() < 0.12:
        return sums.story_problem(rng)
    exercise = sums.draw(rng)
    return sums.question(exercise, rng), exercise.answer()


def json_records(writer: Writer) -> list[Exchange]:
    """Write one to three requests for JSON records."""
    drawn = [records.draw(writer.rng) for _ in range(writer.rng.randint(1, 3))]
    return [(record.request(writer.rng), record.answer()) for record in drawn]


def facts(writer: Writer) -> list[Exchange]:
    """Write two to five questions about the world; one in five is beyond a small model."""
    rules = (
        writer.rng.choice(("fact", "fact", "fact", "fact", "unknown"))
        for _ in range(writer.rng.randint(2, 5))
    )
    return [writer.exchange(rule) for rule in rules]


def small_talk(writer: Writer) -> list[Exchange]:
    """Write one to four remarks: greetings, questions about the model, jokes, thanks."""
    rules = ("hello", "self", "self", "self", "joke", "thanks", "unknown")
    return [writer.exchange(rule) for rule in writer.rng.sample(rules, writer.rng.randint(1, 4))]


# Topics and their weights. Topics with stories have less, since stories are longer than the rest.
TOPICS: Final[Mapping[Callable[[Writer], list[Exchange]], int]] = MappingProxyType(
    {story: 5, questions: 5, summary: 5, sums_asked: 8, json_records: 6, facts: 5, small_talk: 6}
)


def converse(writer: Writer, topics: int) -> list[Exchange]:
    """Write a chat about this number of topics.

    In one of four chats the user gives a name and asks for it at the end.
    """
    drawn = writer.rng.choices(list(TOPICS), list(TOPICS.values()), k=topics)
    exchanges = [exchange for topic in drawn for exchange in topic(writer)]
    chance = writer.rng.random()
    if chance < 0.25:
        person = Telling(writer.talk, writer.rng)
        return [person.pair("named"), *exchanges, person.pair("recall")]
    closing = "bye"
    if chance < 0.35:
        closing = "nameless"
    elif chance < 0.6:
        closing = "thanks"
    return [*exchanges, writer.exchange(closing)]
