"""Flags that are made from the fields of a dataclass, and the dataclass made from their values."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.field_flags import add_flags, options_from
from jaxserve.config import EngineOptions, resolve
from jaxserve.config.flag_values import number_above_0, port_number
from jaxserve.config.option import (
    bounds_of,
    given_options,
    one_of_given,
    option,
    options,
    options_of,
    required,
    values_of,
)
from jaxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Options of which one may be given."""

    red: bool = option(False, "be red")
    shade: str | None = option(None, "have this shade")


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Options of which one asks which were given."""

    width: int = option(3, "how wide")
    paths: tuple[str, ...] = option((), "where")
    round: bool = option(True, "be square")
    colour: object = field(default=None, metadata=one_of_given(Colours))


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Options inside of others."""

    depth: int = option(1, "how deep")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One option of each kind."""

    place: str = required("where to go", names=("place",))
    row_count: int = option(4, "rows", metavar="N", bounds=(1, 9))
    pause: float | None = option(None, "seconds")
    folder: Path | None = option(None, "folder", metavar="DIR")
    kind: str = option("red", "kind", choices=("red", "blue"))
    names: tuple[str, ...] = option((), "names")
    words: tuple[str, ...] = option((), "words", names=("words",), nargs="*", action="extend")
    limit: float = option(2.0, "limit", parse=number_above_0)
    fast: bool = option(False, "be fast", names=("-f", "--fast"))
    safe: bool = option(True, "be unsafe")
    inner: Inner = options(Inner, "inner")
    near: Inner = field(default_factory=Inner)  # no flag
    given: Mapping[str, Any] = given_options(Extent, "extent")


def parse(*words: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Settings)
    return options_from(Settings, parser.parse_args(words))


def test_defaults() -> None:
    assert parse("x") == Settings(place="x")


def test_values() -> None:
    words = "--row-count 7 --pause 0.5 --folder x --kind blue --names a --names b -f --no-safe"
    found = parse("here", "one", "two", *words.split(), *"--limit 3 --depth 5".split())
    assert found == Settings(
        place="here",
        row_count=7,
        pause=0.5,
        folder=Path("x"),
        kind="blue",
        names=("a", "b"),
        words=("one", "two"),
        limit=3.0,
        fast=True,
        safe=False,
        inner=Inner(depth=5),
    )
    assert values_of(found)["depth"] == 5 and values_of(found)["names"] == ("a", "b")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("x --kind green", "invalid choice"),
        ("x --row-count many", "invalid int value"),
        ("x --limit 0", "is not a number above 0"),
        ("x --red --shade dark", "not allowed with"),
        ("", "required"),
    ],
)
def test_what_is_refused(words: str, problem: str) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit), match=problem if words else "2"):
        parse(*words.split())


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        # A value that is the default was given all the same.
        ("--width 3 --no-round", {"width": 3, "round": False}),
        ("--paths a --paths b", {"paths": ("a", "b")}),
        ("--red", {"colour": {"red": True}}),
        ("--shade dark", {"colour": {"shade": "dark"}}),
    ],
)
def test_what_was_given(words: str, given: dict[str, Any]) -> None:
    found = parse("x", *words.split())
    assert found.given == given and values_of(found).items() >= given.items()


def test_help_has_the_titles_of_groups() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    text = parser.format_help()
    assert "inner:\n  --depth DEPTH" in text and "extent:\n  --width WIDTH" in text
    assert "[--red | --shade SHADE]" in text and "--near" not in text


@pytest.mark.parametrize("text", ["-1", "65536", "1.5", "x", "٣"])
def test_no_port(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a port: 0 to 65535"):
        port_number(text)


def test_bounds_are_those_of_the_field() -> None:
    assert bounds_of(Settings, "row_count") == (1, 9)
    bounded = [each.name for each in options_of(EngineOptions) if each.metadata["bounds"]]
    assert bounded
    for name in bounded:
        low, _ = bounds_of(EngineOptions, name)
        wrong = EngineOptions(speculate="ngram", **{name: low - 1})
        with pytest.raises(
            ConfigError, match=f"--{name.replace('_', '-')} is {low - 1}; it must be"
        ):
            resolve(wrong, max_positions=64, lanes=1, affordable_tokens=1000)
