"""Flags of generate, and those that it shares with the other programs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.chat.conversation import HINT
from jaxserve.checkpoints.hub.names import HubModel, model_of_flag
from jaxserve.cli.field_flags import add_flags, given_options
from jaxserve.cli.parser import Parser
from jaxserve.cli.sampling_flags import sampling_flags
from jaxserve.config import EngineOptions
from jaxserve.config.option import flag_of
from jaxserve.errors import ConfigError, RequestError, flag_text
from jaxserve.request import SamplingParams

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "bundled" / "tiny-chat"


def parser() -> argparse.ArgumentParser:
    """Return the parser of `jaxserve generate`."""
    p = Parser(prog="jaxserve generate", description="Generate text from a checkpoint.")
    model_argument(
        p, "folder or name of the model; where --model gives it, the first PROMPT", then="texts"
    )
    p.add_argument(
        "texts",
        nargs="*",
        action="extend",
        default=[],
        metavar="PROMPT",
        help="prompt to go on with; those of --prompt come after it",
    )
    model_flag(p)
    _prompt_flags(
        p.add_argument_group(
            "prompts (default: standard input, as one prompt, without its last newline)"
        )
    )
    p.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="say what the memory holds, and which share of the computed tokens was padding",
    )
    p.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="file to write a timeline of steps, rows, prefix hits and preemptions to, for "
        "ui.perfetto.dev",
    )
    _chat_flags(p.add_argument_group("conversation"))
    sampling_flags(p.add_argument_group("sampling"))
    engine_flags(p.add_argument_group("engine"))
    hosts_flags(p.add_argument_group("several hosts: the same command on each, with its number"))
    return p


def model_argument(
    parser: argparse.ArgumentParser,
    text: str = "folder or name of the model, which --model can give as well",
    *,
    kind: Callable[[str], object] = model_of_flag,
    default: Path | None = BUNDLED,
    then: str | None = None,
) -> None:
    """Add MODEL, an argument that sets what --model sets.

    text: the help. default: that of --model, the same object. then: where --model is given, the
    list of values that MODEL is put first in; otherwise giving both is an error.
    """
    parser.add_argument(
        "model",
        nargs="?",
        action=_ModelArgument,
        kind=kind,
        unset=default,
        then=then,
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=text,
    )


class _ModelArgument(argparse.Action):
    """Stores MODEL, unless --model has replaced the object `unset`.

    argparse would convert the default SUPPRESS too, so `kind`, the value's type, is not its `type`.
    """

    def __init__(
        self,
        *args: Any,
        kind: Callable[[str], object],
        unset: object,
        then: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._kind = kind
        self._unset = unset
        self._then = then

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest)
        if given is self._unset:
            setattr(namespace, self.dest, self._kind(str(values)))
        elif self._then:
            later = getattr(namespace, self._then) or []
            setattr(namespace, self._then, [values, *later])
        else:
            parser.error(f"{flag_of(self.dest)} is {given}, and {values} is another; give one")


def model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=model_of_flag,
        default=BUNDLED,
        metavar="MODEL",
        help="checkpoint folder, Hugging Face's or Orbax, or org/name[@revision] of a model on the "
        "hub (default: the bundled model)",
    )


def _prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="prompt; may be given several times"
    )
    group.add_argument(
        "--prompts-file",
        type=Path,
        metavar="F",
        help="file with one prompt per line, in UTF-8; empty lines are skipped",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per completion, and nothing else on standard output",
    )


def _chat_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chat",
        action="store_true",
        help="take the prompts as turns of one conversation and answer each before the next; "
        f"standard input has one turn per line; at a terminal you type them ({HINT})",
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template to use instead of the model's chat template",
    )


def size_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of EngineOptions, which decide the shapes of an engine's steps."""
    add_flags(group, EngineOptions, unset_is_none=True)


def engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        default="auto",
        help="dtype of activations and of weights that are not quantized: auto (as stored), "
        "float32 or bfloat16 (default: auto)",
    )
    group.add_argument(
        "--weights",
        default="auto",
        metavar="FORM",
        help="format of the weights in memory: auto (as stored), int8, fp8, int4, or int4 in "
        "groups: int4-g32, int4-g64, int4-g128; w8a8-int8 and w8a8-fp8 quantize activations too, "
        "where the chip multiplies such numbers; a +head at the end quantizes the head as well "
        "(default: auto)",
    )
    size_flags(group)
    group.add_argument(
        "--draft-model",
        type=model_of_flag,
        metavar="MODEL",
        help="folder or name of a smaller model with the same tokens, for --speculate draft",
    )
    _mesh_flags(group)
    group.add_argument(
        "--compilation-cache",
        type=Path,
        metavar="DIR",
        help="folder in which compiled steps are kept (default: that of JAX_COMPILATION_CACHE_DIR, "
        "or jaxserve/xla in the user's cache)",
    )


def _mesh_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=int,
        default=1,
        help="data axis of the mesh: devices that share the rows and their pages (default: 1)",
    )
    group.add_argument(
        "--expert",
        type=int,
        default=1,
        help="expert axis of the mesh: devices that share the experts, and the rows as with "
        "--data (default: 1)",
    )
    group.add_argument(
        "--tensor",
        type=int,
        default=1,
        help="tensor axis of the mesh: devices that share every layer's weights and KV heads; "
        "with fewer KV heads, several devices hold the same one (default: 1)",
    )


def hosts_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hosts", type=int, metavar="N", help="number of hosts that run one engine together"
    )
    group.add_argument(
        "--host-index",
        type=int,
        metavar="I",
        help="number of this host, 0 to N-1; host 0 leads",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of host 0, where the other hosts find it",
    )
    group.add_argument(
        "--pod",
        action="store_true",
        help="read the hosts from the environment: a TPU slice, a LeaderWorkerSet or Slurm",
    )
    group.add_argument(
        "--control-port",
        type=int,
        default=0,
        metavar="N",
        help="port of host 0 for the other hosts; 0 takes any free one (default: 0)",
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds to wait until all hosts are there (default: 300)",
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return what the flags of the engine ask for."""
    return given_options(EngineOptions, args)


def draft_model(args: argparse.Namespace) -> Path | HubModel | None:
    """Return the draft model; ConfigError on several hosts."""
    if args.draft_model and (args.hosts or args.pod):
        raise ConfigError(
            flag_text(
                "--draft-model",
                args.draft_model,
                "draft models are not built in for several hosts (--speculate ngram is)",
            )
        )
    return args.draft_model


def check_chat_flags(args: argparse.Namespace, params: SamplingParams) -> None:
    """Raise RequestError for flags of a conversation without --chat, and for the reverse."""
    if not args.chat:
        for name in ("system", "chat_template"):
            if getattr(args, name) is not None:
                raise RequestError(flag_of(name), "is for a conversation (add --chat)")
        return
    one_answer = "but a turn of a conversation has one answer, and only that (leave it out)"
    if params.n > 1:
        raise RequestError("--n", f"is {params.n}, {one_answer}")
    if params.echo:
        raise RequestError("--echo", f"is given, {one_answer}")
