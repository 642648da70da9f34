"""Writes small sums and differences, bare and as problems about things, with answers in words."""

import random
from dataclasses import dataclass
from typing import Final

LARGEST: Final = 20  # largest operand; the smallest is 0
THINGS: Final = ("apples", "cookies", "balls", "books", "shells", "nuts", "flowers", "stones")
OWNERS: Final = (
    ("Lily", "she"),
    ("Tim", "he"),
    ("Mia", "she"),
    ("Sam", "he"),
    ("Emma", "she"),
    ("Max", "he"),
)


@dataclass(frozen=True)
class Sum:
    """The sum first + second, or the difference first - second, which is never negative."""

    first: int
    second: int
    plus: bool

    @property
    def result(self) -> int:
        return self.first + self.second if self.plus else self.first - self.second

    def words(self) -> str:
        return f"{self.first} {'plus' if self.plus else 'minus'} {self.second}"

    def signs(self) -> str:
        return f"{self.first} {'+' if self.plus else '-'} {self.second}"

    def answer(self) -> str:
        return f"{self.words()} is {self.result}."


def all_sums() -> list[Sum]:
    """Return every sum and difference that the corpus can have."""
    numbers = range(LARGEST + 1)
    return [
        Sum(a, b, plus)
        for plus in (True, False)
        for a in numbers
        for b in numbers
        if plus or b <= a
    ]


def draw(rng: random.Random) -> Sum:
    """Draw a sum or, less often because there are fewer, a difference."""
    plus = rng.random() < (LARGEST + 1) / (LARGEST + 1 + LARGEST / 2 + 1)
    first = rng.randint(0, LARGEST)
    second = rng.randint(0, LARGEST)
    if plus:
        return Sum(first, second, plus)
    return Sum(max(first, second), min(first, second), plus)


def question(exercise: Sum, rng: random.Random) -> str:
    """Ask for the exercise in one of many ways."""
    a = exercise.first
    b = exercise.second
    asked = [f"Add {a} and {b}.", f"What is the sum of {a} and {b}?"]
    if not exercise.plus:
        asked = [f"Take {b} away from {a}.", f"Subtract {b} from {a}."]
    words = [
        f"What is {exercise.words()}?",
        f"How much is {exercise.words()}?",
        f"{exercise.words()}?",
    ]
    signs = [f"What is {exercise.signs()}?", f"{exercise.signs()} = ?", f"{exercise.signs()}"]
    return rng.choice([words[0], words[0], *words, *signs, *asked])


def story_problem(rng: random.Random) -> tuple[str, str]:
    """Write a question about the things of a person, and the answer with its sum."""
    # The order of draws decides about the corpus of a seed.
    name, who = rng.choice(OWNERS)
    thing = rng.choice(THINGS)
    first = rng.randint(2, LARGEST)
    second = rng.randint(2, first)
    exercise = Sum(first, second, plus=rng.random() < 0.5)
    change = f"finds {exercise.second} more" if exercise.plus else f"gives {exercise.second} away"
    left = "now" if exercise.plus else "left"
    asked = (
        f"{name} has {exercise.first} {thing} and {change}. How many {thing} does {who} have "
        f"{left}?"
    )
    return asked, f"{exercise.answer()} {name} has {exercise.result} {thing} {left}."


def sheet(rng: random.Random) -> str:
    """Write eight to sixteen exercises with their answers, one a line."""
    return "\n".join(draw(rng).answer() for _ in range(rng.randint(8, 16)))
