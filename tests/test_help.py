"""Help texts of all programs: each says by itself what its flag is for."""

import argparse
import re
from collections.abc import Iterator

import pytest

from tests.public_names.programs import PROGRAMS, parser_of

# First words that lean on the flag before, or on its name.
LEANING = (
    "a|after|an|and|as|by|default|for|if|instead|it|its|likewise|of|or|otherwise|same|so|that|"
    "the same|their|them|then|there|these|they|this|those|until|what|when|where|whether|which|who|"
    "with"
)
STARTS_LEANING = re.compile(rf"({LEANING})\b(?! --)")
SCIENTIFIC = re.compile(r"\d(?:\.\d+)?e[+-]?\d")


def help_texts(program: str) -> Iterator[tuple[str, str]]:
    """Yield name and rendered text of every flag, argument and command of a program."""
    parsers = [(program, parser_of(program))]
    for name, parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action._choices_actions:
                    yield f"{name} {command.dest}", str(command.help or "")
                parsers += [(f"{name} {key}", found) for key, found in action.choices.items()]
            elif not isinstance(action, argparse._HelpAction):
                flag = (action.option_strings or [action.metavar])[0]
                yield f"{name} {flag}", (action.help or "") % vars(action)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_text_stands_alone(program: str) -> None:
    wrong = [
        f"{name}: {text!r}"
        for name, text in help_texts(program)
        if not text or STARTS_LEANING.match(text) or SCIENTIFIC.search(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("the same, one per line", True),
        ("of each run", True),
        ("its key", True),
        ("instead: nothing is sent", True),
        ("seconds (1.04858e+06)", True),
        ("", True),
        ("seconds until a request fails (default: 600)", False),
        ("itemized output", False),
        ("after --: more flags", False),
    ],
)
def test_what_is_refused(text: str, is_refused: bool) -> None:
    found = not text or STARTS_LEANING.match(text) or SCIENTIFIC.search(text)
    assert bool(found) == is_refused
