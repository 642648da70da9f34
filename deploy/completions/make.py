"""Writes the files by which shells complete the command `jaxserve`, from the parsers.

make completions
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import shtab

from jaxserve.programs import PROGRAMS

FOLDER = Path(__file__).parent
FILES = {"bash": "jaxserve.bash", "zsh": "_jaxserve", "fish": "jaxserve.fish"}


def completion(shell: str) -> str:
    """Return the text of the file for a shell."""
    command = argparse.ArgumentParser(prog="jaxserve")
    command.add_argument("--version", action="version", version="")
    programs: Any = command.add_subparsers()
    for name, (module, what) in PROGRAMS.items():
        parser = import_module(module).parser()
        _mark_paths(parser)
        # add_parser() would make a new parser; these are made already.
        programs._name_parser_map[name] = parser
        programs._choices_actions.append(programs._ChoicesPseudoAction(name, (), what))
    return shtab.complete(command, shell)


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    """Tell shtab which values are paths, in the programs of a program as well."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for program in action.choices.values():
                _mark_paths(program)
        elif action.metavar in ("DIR", "MODEL", "SRC", "DST"):
            action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
        elif action.type is Path:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    for shell, name in FILES.items():
        (FOLDER / name).write_text(completion(shell))
