"""Flags of `jaxserve generate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.chat import TemplateOptions
from jaxserve.chat.conversation import HINT
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.cli.field_flags import add_flags, options_from
from jaxserve.cli.flags import EngineFlags, model_argument, model_option
from jaxserve.cli.parser import Parser
from jaxserve.cli.template_flags import template_fields
from jaxserve.cluster.hosts import HostOptions
from jaxserve.config.option import flag_of, given_options, option, options
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts to go on with, and the form of the output."""

    prompt: tuple[str, ...] = option((), "prompt; may be given several times", metavar="TEXT")
    prompts_file: Path | None = option(
        None, "file with one prompt per line, in UTF-8; empty lines are skipped", metavar="F"
    )
    json: bool = option(
        False, "print one JSON object per completion, and nothing else on standard output"
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """A conversation in place of prompts."""

    chat: bool = option(
        False,
        "take the prompts as turns of one conversation and answer each before the next; standard "
        f"input has one turn per line; at a terminal you type them ({HINT})",
    )
    system: str | None = option(None, "system message of the conversation", metavar="TEXT")
    chat_template: Path | None = option(
        None, "Jinja template to use instead of the model's chat template", metavar="FILE"
    )
    template: Mapping[str, Any] = given_options(TemplateOptions)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """A file of requests in place of prompts."""

    batch_file: Path | None = option(
        None,
        "file of requests in OpenAI's batch format, one JSON object per line: chat, completions "
        "and embeddings, with their sampling parameters",
        metavar="FILE",
    )
    output: Path | None = option(
        None,
        "file that the answers to --batch-file are appended to, in any order; a run that was "
        "killed goes on where it was",
        metavar="FILE",
    )
    served_model_name: str | None = option(
        None,
        "name of the model in the requests of --batch-file (default: that of --model)",
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `jaxserve generate`."""

    texts: tuple[str, ...] = option(
        (),
        "prompt to go on with; those of --prompt come after it",
        metavar="PROMPT",
        names=("texts",),
        nargs="*",
        action="extend",
    )
    model: Path | HubModel = model_option()
    prompts: PromptOptions = options(
        PromptOptions, "prompts (default: standard input, as one prompt, without its last newline)"
    )
    verbose: bool = option(
        False,
        "say what the memory holds, and which share of the computed tokens was padding",
        names=("-v", "--verbose"),
    )
    trace: Path | None = option(
        None,
        "file to write a timeline of steps, rows, prefix hits and preemptions to, for "
        "ui.perfetto.dev",
        metavar="FILE",
    )
    conversation: ChatOptions = options(ChatOptions, "conversation")
    batch: BatchOptions = options(BatchOptions, "batch")
    sampling: Mapping[str, Any] = given_options(SamplingParams, "sampling")
    engine: EngineFlags = options(EngineFlags, "engine")
    hosts: HostOptions = options(
        HostOptions, "several hosts: the same command on each, with its number"
    )

    @property
    def given_prompts(self) -> list[str]:
        """Prompts on the command line: arguments first, then those of --prompt."""
        return [*self.texts, *self.prompts.prompt]


def parser() -> Parser:
    """Return the parser of `jaxserve generate`."""
    p = Parser(prog="jaxserve generate", description="Generate text from a checkpoint.")
    model_argument(
        p, "folder or name of the model; where --model gives it, the first PROMPT", then="texts"
    )
    add_flags(p, GenerateOptions)
    return p


def parse(arguments: Sequence[str] | None = None) -> GenerateOptions:
    """Return the options of a command line, by default that of this process."""
    return options_from(GenerateOptions, parser().parse_args(arguments))


def check_batch_flags(options: GenerateOptions) -> None:
    """Raise RequestError for flags that do not go together with --batch-file, or need it."""
    batch = options.batch
    if batch.batch_file is None:
        for name in ("output", "served_model_name"):
            if getattr(batch, name) is not None:
                raise RequestError(flag_of(name), "is for a file of requests (add --batch-file)")
        return
    if batch.output is None:
        raise RequestError("--batch-file", "needs a file for the answers (add --output)")
    for name in (*options.sampling, *options.conversation.template):
        problem = "is given, but each line of --batch-file has its own parameters (leave it out)"
        raise RequestError(flag_of(name), problem)
    others = {
        "--prompt": options.given_prompts,
        "--prompts-file": options.prompts.prompts_file,
        "--json": options.prompts.json,
        "--chat": options.conversation.chat,
        "--system": options.conversation.system,
    }
    for flag, given in others.items():
        if given:
            raise RequestError(flag, "is given together with --batch-file (leave one of them out)")


def check_chat_flags(conversation: ChatOptions, params: SamplingParams) -> None:
    """Raise RequestError for flags of a conversation without --chat, and for the reverse."""
    template_fields(conversation.template, conversation.chat)
    if not conversation.chat:
        for name in ("system", "chat_template"):
            if getattr(conversation, name) is not None:
                raise RequestError(flag_of(name), "is for a conversation (add --chat)")
        return
    one_answer = "but a turn of a conversation has one answer, and only that (leave it out)"
    if params.n > 1:
        raise RequestError("--n", f"is {params.n}, {one_answer}")
    if params.echo:
        raise RequestError("--echo", f"is given, {one_answer}")
