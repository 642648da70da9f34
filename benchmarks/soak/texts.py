"""Prompts, tools and grammars that the actions send."""

import random
from typing import Any

TEXTS = (
    "Once upon a time",
    "What is 7 plus 5?",
    "The fox",
    "A very long story about a green frog. " * 10,
)
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 99}
WORD: dict[str, Any] = {"enum": ["red", "green", "blue"]}


def messages(dice: random.Random) -> list[dict[str, Any]]:
    return [{"role": "user", "content": dice.choice(TEXTS)}]


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def schema(dice: random.Random) -> dict[str, Any]:
    """Return the schema of a small object; half of all have names that the server never saw."""
    end = f"_{dice.getrandbits(48):x}" if dice.random() < 0.5 else ""
    return object_of({f"count{end}": DIGIT, f"color{end}": WORD})


def structures(dice: random.Random) -> dict[str, Any]:
    """Return a response_format of a kind other than a schema; half of all are new."""
    number = dice.randrange(10**12) if dice.random() < 0.5 else 7
    return dice.choice(
        (
            {"type": "regex", "regex": f"{number} plus [0-9]{{1,2}} is [0-9]{{1,2}}"},
            {"type": "choice", "choice": ["yes", "no", f"maybe {number}"]},
            {"type": "lark", "lark": f'start: "{number} " ("yes" | "no")'},
        )
    )


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as gRPC's client takes it, which is the `function` of one over HTTP."""
    return {"name": name, "description": f"{name}s", "parameters": object_of(properties)}


def tools(dice: random.Random) -> list[dict[str, Any]]:
    """Return two tools; the schema of the second is new in half of all requests."""
    end = f"_{dice.getrandbits(48):x}" if dice.random() < 0.5 else ""
    return [tool("add", {"a": DIGIT, "b": DIGIT}), tool("paint", {f"color{end}": WORD})]
