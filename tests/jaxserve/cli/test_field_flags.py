"""Flags that are made from the fields of a dataclass."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxserve.cli.field_flags import add_flags, given_options
from jaxserve.config import EngineOptions, resolve
from jaxserve.config.option import bounds_of, flag, options_of
from jaxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One option of each kind."""

    row_count: int = field(default=4, metadata=flag("rows", metavar="N", bounds=(1, 9)))
    pause: float | None = field(default=None, metadata=flag("seconds"))
    folder: Path | None = field(default=None, metadata=flag("folder", metavar="DIR"))
    colour: str = field(default="red", metadata=flag("colour", choices=("red", "blue")))
    names: tuple[str, ...] = field(default=(), metadata=flag("names"))
    fast: bool = field(default=False, metadata=flag("be fast"))
    safe: bool = field(default=True, metadata=flag("be unsafe"))
    derived: bool = False  # no flag


def parse(*words: str, unset_is_none: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser.add_argument_group("settings"), Settings, unset_is_none=unset_is_none)
    return parser.parse_args(words)


def test_defaults() -> None:
    args = parse()
    assert (args.row_count, args.pause, args.colour, args.names) == (4, None, "red", [])
    assert (args.fast, args.safe) == (False, True)
    assert not hasattr(args, "derived")
    assert set(vars(parse(unset_is_none=True)).values()) == {None}


def test_values() -> None:
    words = "--row-count 7 --pause 0.5 --folder x --colour blue --names a --names b --fast".split()
    args = parse(*words, "--no-safe")
    assert (args.row_count, args.pause, args.folder) == (7, 0.5, Path("x"))
    assert (args.colour, args.names, args.fast, args.safe) == ("blue", ["a", "b"], True, False)
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        parse("--colour", "green")


def test_only_what_was_given() -> None:
    given = given_options(Settings, parse("--row-count", "7", "--no-safe", unset_is_none=True))
    assert given == Settings(row_count=7, safe=False)
    assert given_options(EngineOptions, argparse.Namespace(max_batch=3)) == EngineOptions(
        max_batch=3
    )


def test_bounds_are_those_of_the_field() -> None:
    assert bounds_of(Settings, "row_count") == (1, 9)
    bounded = [each.name for each in options_of(EngineOptions) if each.metadata["bounds"]]
    assert bounded
    for name in bounded:
        low, _ = bounds_of(EngineOptions, name)
        options = EngineOptions(speculate="ngram", **{name: low - 1})
        with pytest.raises(
            ConfigError, match=f"--{name.replace('_', '-')} is {low - 1}; it must be"
        ):
            resolve(options, max_positions=64, lanes=1, affordable_tokens=1000)
