"""Flags of the programs, the names that their values have, and exit codes."""

import argparse
import io
import runpy
import signal
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import fields
from functools import cache
from typing import Any
from unittest.mock import patch

from jaxserve.bench.latency import Objective
from jaxserve.bench.serve import NONE_ANSWERED
from jaxserve.cli.exits import BAD_INPUT, PIPE_CLOSED
from jaxserve.cluster import heartbeat
from jaxserve.config import PAGE_DTYPES, PROPOSERS
from jaxserve.doctor.__main__ import FAULTS
from jaxserve.loading.load_plan import DTYPES
from jaxserve.models.precision import HEAD
from jaxserve.models.quant import SCHEMES
from jaxserve.pallas_kernels.dispatch import GROUPED, IMPLEMENTATIONS, QUANTIZED, RECURRENCES
from jaxserve.plan.model_config import shipped
from jaxserve.plan.program import DOES_NOT_FIT
from jaxserve.server import lifecycle
from jaxserve.sharding.chips import CHIPS
from jaxserve.sigint import INTERRUPTED
from tests.public_names import shown

PROGRAMS = (
    "checkpoints.convert",
    "jaxserve",
    "jaxserve.bench",
    "jaxserve.client",
    "jaxserve.convert",
    "jaxserve.doctor",
    "jaxserve.generate",
    "jaxserve.plan",
    "jaxserve.serve",
)


class Parsed(BaseException):
    """A program has come to its parser. No Exception: nothing of the program is to catch it."""

    def __init__(self, parser: argparse.ArgumentParser):
        super().__init__()
        self.parser = parser


@cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """What `python -m program` parses its flags with. It runs in this process, up to there."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Parsed(parser)

    interrupt = signal.getsignal(signal.SIGINT)  # a program may set how it ends on Ctrl-C
    with patch.object(argparse.ArgumentParser, "parse_known_args", stop), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it may have been imported before
        try:
            runpy.run_module(program, run_name="__main__")
        except Parsed as found:
            return found.parser
        finally:
            signal.signal(signal.SIGINT, interrupt)
    raise AssertionError(f"{program} has parsed no flags")


def flags() -> dict[str, str]:
    return dict(entry for program in PROGRAMS for entry in _entries(program, parser_of(program)))


def _entries(program: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Flags and arguments of a program, or of one of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{program} {name}", "command"
                yield from _entries(f"{program} {name}", command)
        elif not isinstance(action, argparse._HelpAction):
            for name in action.option_strings or [str(action.metavar)]:
                yield f"{program} {name}", ", ".join(_told(action))
                for choice in action.choices or ():
                    yield f"{program} {name} {choice}", "choice"


def _told(action: argparse.Action) -> Iterator[str]:
    if action.nargs == 0:
        yield "switch"
        return
    yield "one of its choices" if action.choices else "value"
    if action.nargs == "?":
        yield "may be left out" if action.const is None else f"alone {action.const}"
    elif action.nargs == "*":
        yield "any number"
    if isinstance(action, argparse._AppendAction):
        yield "several times"
    if action.required:
        yield "required"
    elif action.default not in (None, [], argparse.SUPPRESS):
        yield f"default {shown.value(action.default)}"


def flag_values() -> dict[str, str]:
    """Words that flags take and argparse does not know: for all programs with the flag, or one."""
    named = {
        "--attention": ("auto", *IMPLEMENTATIONS),
        "--dtype": ("auto", *DTYPES),
        "--grouped-matmul": ("auto", *GROUPED),
        "--kv": ("auto", *PAGE_DTYPES),
        "--quantized-matmul": ("auto", *QUANTIZED),
        "--recurrence": ("auto", *RECURRENCES),
        "--speculate": PROPOSERS,
        "--weights": ("auto", *SCHEMES, f"FORM{HEAD}"),
        "jaxserve.bench serve --slo": [field.name for field in fields(Objective)],
        "jaxserve.plan --model": shipped(),
        "jaxserve.plan --topology": ("cpu", *CHIPS),
    }
    return {f"{flag} {name}": "is taken" for flag, names in named.items() for name in names}


def exit_codes() -> dict[str, str]:
    """Exit codes by what has happened."""
    codes = {
        "any program: interrupted": INTERRUPTED,
        "any program: nobody reads standard output": PIPE_CLOSED,
        "any program: something asked for cannot be done": BAD_INPUT,
        "jaxserve.bench serve: no request was answered": NONE_ANSWERED,
        "jaxserve.doctor: something is wrong": FAULTS,
        "jaxserve.plan: it does not fit": DOES_NOT_FIT,
        "jaxserve.serve: the engine has failed": lifecycle.FAILED,
        "several hosts: one of them is lost": heartbeat.FAILED,
    }
    return {what: str(code) for what, code in codes.items()} | dict(map(_refusal, PROGRAMS))


def _refusal(program: str) -> tuple[str, str]:
    """Exit code for a flag that there is not."""
    try:
        with redirect_stderr(io.StringIO()):
            parser_of(program).error("there is no such flag")
    except SystemExit as end:
        return f"{program}: a flag is refused", str(end.code)
