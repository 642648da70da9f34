"""Entry point of `jaxserve doctor`."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console

from jaxserve.backends import importing_jax
from jaxserve.cli.exits import exit_code
from jaxserve.cli.output import prepare_output
from jaxserve.cli.parser import Parser
from jaxserve.doctor.machine import (
    INSTALL_AGAIN,
    Finding,
    folders,
    hub_folder,
    machine,
    packages,
)
from jaxserve.errors import ConfigError

FAULTS = 1  # exit code where something is wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code: 0 if nothing is wrong, otherwise 1."""
    args = parser().parse_args(arguments)
    prepare_output(args.json)
    return exit_code(lambda: report(args.json))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    p = Parser(
        prog="jaxserve doctor",
        description="Look for faults of this machine and this installation. Exit code: 0 if "
        "nothing is wrong, 1 if something is.",
    )
    p.add_argument("--json", action="store_true", help="print one JSON list, and nothing else")
    return p


def report(as_json: bool) -> int:
    """Look at everything, print what was found, and return the exit code."""
    findings = [*packages(), *machine(), *folders(), *hub_folder(), *seen_by_jax()]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        show(findings, Console(highlight=False))
    return FAULTS if any(finding.fault for finding in findings) else 0


def seen_by_jax() -> Iterator[Finding]:
    """Yield what jax sees; one fault if it cannot be imported."""
    try:
        with importing_jax():
            from jaxserve.doctor.devices import devices
    except ConfigError as error:  # it says what to do
        yield Finding("jax", "cannot be imported", str(error))
        return
    except Exception as error:  # an installation can be broken in any way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Finding("jax", "cannot be imported", f"{reason}: {INSTALL_AGAIN}")
        return
    yield from devices()


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding, and its fault in a line below."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "FAULT" if finding.fault else "ok"
        style = "red" if finding.fault else None
        line = f"{mark:5}  {finding.name:{width}}  {finding.value}"
        console.print(line, style=style, markup=False, soft_wrap=True)
        if finding.fault:
            advice = f"{'':{width + 9}}{finding.fault}"
            console.print(advice, style=style, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
