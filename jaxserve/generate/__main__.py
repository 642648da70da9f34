"""Entry point of `jaxserve generate`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

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
    with_found_models,
)
from jaxserve.cli.exits import exit_code
from jaxserve.cli.inputs import read_prompts
from jaxserve.cli.output import prepare_output
from jaxserve.cli.sampling_flags import sampling_fields
from jaxserve.cluster.hosts import Hosts, leave
from jaxserve.errors import ConfigError
from jaxserve.generate.flags import (
    GenerateOptions,
    check_batch_flags,
    check_chat_flags,
    parse,
    parser,
)
from jaxserve.sampling_params import SamplingParams

__all__ = ["main", "parser"]

A_PROMPT = "(if it is a prompt, give it with --prompt)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    The code is 0, or 2 where a request cannot be fulfilled; each failure is one line on standard
    error. As a shell reports signals, it is 130 after Ctrl-C, and 141 when the reader of standard
    output has closed it.
    """
    options = parse(arguments)
    prepare_output(options.prompts.json)
    return leave(exit_code(lambda: run(options)))


def run(options: GenerateOptions) -> int:
    """Check the options, then import jax and generate; return the exit code."""
    params = SamplingParams(**sampling_fields(options.sampling, options.prompts.json))
    conversation = options.conversation
    check_batch_flags(options)
    batch_file = options.batch.batch_file
    if not batch_file:
        check_chat_flags(conversation, params)
    hosts = Hosts.of(options.hosts)
    check_engine_flags(options.engine, options.hosts)
    check_new_file("--trace", options.trace)
    prompts = None
    quiet_hub()
    if hosts.alone:
        check_text_alone(options)
        with prompts_explained(options):
            options = with_found_models(options)
        check_file("--chat-template", conversation.chat_template)
        check_file("--batch-file", batch_file)
        check_new_file("--output", options.batch.output)
        prompts = prompts_of(options)
    with importing_jax():
        from jaxserve.generate.program import generate

    return generate(options, hosts, params, prompts)


def prompts_of(options: GenerateOptions) -> list[str]:
    """Return the prompts, or the turns that flags give: those of standard input come later."""
    given = options.given_prompts
    file = options.prompts.prompts_file
    if options.batch.batch_file or (options.conversation.chat and not (given or file)):
        return []
    return read_prompts(given, file)


def check_text_alone(options: GenerateOptions) -> None:
    """Raise ConfigError where several words alone, which are taken for MODEL, name no folder."""
    model = str(options.model)
    if len(model.split()) < 2 or options.given_prompts or os.path.isdir(model):
        return
    raise ConfigError(f"{model}: there is no such folder {A_PROMPT}")


@contextmanager
def prompts_explained(options: GenerateOptions) -> Iterator[None]:
    """Add to the error about a name that the hub does not have that it may be a prompt."""
    try:
        yield
    except CheckpointError as error:
        is_unknown = str(error).startswith(f"{options.model}: there is no such folder")
        if not is_unknown or isinstance(options.model, Path) or options.given_prompts:
            raise
        raise CheckpointError(f"{error} {A_PROMPT}") from error


if __name__ == "__main__":
    sys.exit(main())
