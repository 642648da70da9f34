"""Writes descriptions in words, and JSON objects with the same fields."""

import json
import random
from dataclasses import dataclass
from typing import Final

NAMES: Final = (
    "Lily",
    "Mia",
    "Emma",
    "Rosie",
    "Tim",
    "Max",
    "Jack",
    "Sam",
    "Amy",
    "Grace",
    "Kate",
    "Tom",
    "Peter",
    "Oscar",
)
CITIES: Final = ("Paris", "Rome", "London", "Berlin", "Madrid", "Oslo", "Tokyo", "Lima")
JOBS: Final = ("teacher", "baker", "farmer", "doctor", "painter", "pilot")
COLORS: Final = ("red", "blue", "green", "yellow", "white", "black", "pink", "brown")
PETS: Final = ("dog", "cat", "rabbit", "horse", "parrot", "mouse", "turtle")
TOYS: Final = ("ball", "doll", "boat", "car", "drum", "hat", "train", "robot", "kite")
EVENTS: Final = ("party", "picnic", "race", "concert", "meeting", "wedding")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PLACES: Final = ("park", "garden", "forest", "school", "library", "museum")

# Kinds of record: the values of each field, in order, and sentences that state all of them.
KINDS: Final = (
    (
        {"name": NAMES, "age": range(1, 100), "city": CITIES},
        (
            "{name} is {age} years old and lives in {city}.",
            "{name} lives in {city} and is {age} years old.",
        ),
    ),
    (
        {"name": NAMES, "job": JOBS, "city": CITIES},
        ("{name} is a {job} in {city}.", "{name} lives in {city} and works as a {job}."),
    ),
    (
        {"name": NAMES, "pet": PETS, "color": COLORS},
        ("{name} has a {color} {pet}.", "The {pet} of {name} is {color}."),
    ),
    (
        {"item": TOYS, "color": COLORS, "price": range(1, 100)},
        ("The {color} {item} costs {price} dollars.", "A {item} in {color} is {price} dollars."),
    ),
    (
        {"event": EVENTS, "day": DAYS, "place": PLACES},
        ("The {event} is on {day} in the {place}.", "On {day} there is a {event} in the {place}."),
    ),
)


@dataclass(frozen=True)
class Record:
    """A request for JSON.

    sentence: states the fields. fields: the object that is the answer. named: the request names its
    fields.
    """

    sentence: str
    fields: dict[str, str | int]
    named: bool

    def request(self, rng: random.Random) -> str:
        """Write the request."""
        if self.named:
            *others, last = self.fields
            names = f"{', '.join(others)} and {last}" if others else last
            return rng.choice(
                (
                    f"Write JSON with {names}: {self.sentence}",
                    f"{self.sentence} Give me {names} as JSON.",
                )
            )
        return rng.choice(
            (
                f"Write this as JSON: {self.sentence}",
                f"{self.sentence} Write this as JSON.",
                f"Turn this into JSON: {self.sentence}",
            )
        )

    def answer(self) -> str:
        """Return the JSON object."""
        return json.dumps(self.fields)


def draw(rng: random.Random) -> Record:
    """Draw a record of any kind.

    Named fields are some of the kind's fields in any order; otherwise the object has all of them.
    """
    pools, sentences = rng.choice(KINDS)
    values = {name: rng.choice(pool) for name, pool in pools.items()}
    sentence = rng.choice(sentences).format(**values)
    if rng.random() < 0.6:
        return Record(sentence, values, named=False)
    names = rng.sample(list(values), rng.randint(1, len(values)))
    return Record(sentence, {name: values[name] for name in names}, named=True)
