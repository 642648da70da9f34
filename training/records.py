"""Descriptions in words and the JSON objects that hold the same fields."""

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

# Kinds of record: their fields in order, with what they are drawn from, and sentences that state
# all of them.
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
    """One request for JSON: the sentence, the object asked for, and whether its fields are
    named."""

    sentence: str
    fields: dict[str, str | int]
    named: bool

    def request(self, rng: random.Random) -> str:
        if self.named:
            *most, last = self.fields
            names = f"{', '.join(most)} and {last}" if most else last
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
        return json.dumps(self.fields)


def draw(rng: random.Random) -> Record:
    """A record of any kind; where its fields are named they are some of them in any order, else all
    in their own.
    """
    pools, sentences = rng.choice(KINDS)
    values = {name: rng.choice(pool) for name, pool in pools.items()}
    sentence = rng.choice(sentences).format(**values)
    if rng.random() < 0.6:
        return Record(sentence, values, named=False)
    names = rng.sample(list(values), rng.randint(1, len(values)))
    return Record(sentence, {name: values[name] for name in names}, named=True)
