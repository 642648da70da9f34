"""Entry point of `jaxserve generate`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxserve.backends import importing_jax
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.cli.checks import (
    check_engine_flags,
    check_file,
    check_new_file,
    quiet_hub,
    resolve_models,
)
from jaxserve.cli.exits import exit_code
from jaxserve.cli.flags import check_chat_flags, parser
from jaxserve.cli.inputs import prompts_of
from jaxserve.cli.output import prepare_output
from jaxserve.cli.sampling_flags import sampling_params
from jaxserve.cluster.hosts import Hosts, leave
from jaxserve.errors import ConfigError

A_PROMPT = "(if it is a prompt, give it with --prompt)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    The code is 0, or 2 where a request cannot be fulfilled; each failure is one line on standard
    error. As a shell reports signals, it is 130 after Ctrl-C, and 141 when the reader of standard
    output has closed it.
    """
    args = parser().parse_args(arguments)
    prepare_output(args.json)
    return leave(exit_code(lambda: run(args)))


def run(args: argparse.Namespace) -> int:
    """Check the arguments, then import jax and generate; return the exit code."""
    params = sampling_params(args)
    check_chat_flags(args, params)
    hosts = Hosts.of(args)
    check_engine_flags(args)
    check_new_file("--trace", args.trace)
    prompts = None
    quiet_hub()
    if hosts.alone:
        check_text_alone(args)
        with prompts_explained(args):
            resolve_models(args)
        check_file("--chat-template", args.chat_template)
        prompts = [] if args.chat else prompts_of(args)
    with importing_jax():
        from jaxserve.generate.program import generate

    return generate(args, hosts, params, prompts)


def check_text_alone(args: argparse.Namespace) -> None:
    """Raise ConfigError where several words alone, which are taken for MODEL, name no folder."""
    words = str(args.model).split()
    if len(words) < 2 or args.texts or args.prompt or os.path.isdir(str(args.model)):
        return
    raise ConfigError(f"{args.model}: there is no such folder {A_PROMPT}")


@contextmanager
def prompts_explained(args: argparse.Namespace) -> Iterator[None]:
    """Add to the error about a name that the hub does not have that it may be a prompt."""
    try:
        yield
    except CheckpointError as error:
        is_unknown = str(error).startswith(f"{args.model}: there is no such folder")
        if not is_unknown or isinstance(args.model, Path) or args.texts or args.prompt:
            raise
        raise CheckpointError(f"{error} {A_PROMPT}") from error


if __name__ == "__main__":
    sys.exit(main())
