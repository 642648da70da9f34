"""The flags of generate, and what they say of sampling and of the engine."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from jaxserve.chat.conversation import HINT
from jaxserve.cli.parser import Parser
from jaxserve.config import DRAFTED, PAGE_DTYPES, PRESETS, PROPOSERS, EngineOptions
from jaxserve.errors import ConfigError, RequestError
from jaxserve.request import SamplingParams
from jaxserve.structure import KINDS, Structure

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat"


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m jaxserve.generate", description="Generate text from a checkpoint.")
    model_flag(p)
    _prompt_flags(
        p.add_argument_group(
            "prompts (default: standard input, as one prompt, without its last newline)"
        )
    )
    _chat_flags(p.add_argument_group("conversation"))
    sampling_flags(p.add_argument_group("sampling"))
    engine_flags(p.add_argument_group("engine"))
    hosts_flags(p.add_argument_group("several hosts: the same command on each, with its number"))
    return p


def model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        default=BUNDLED,
        metavar="DIR",
        help="checkpoint folder as Hugging Face publishes it (default: the bundled model)",
    )


def _prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="may be given several times"
    )
    group.add_argument(
        "--prompts-file",
        type=Path,
        metavar="F",
        help="UTF-8, one prompt per line; empty lines are skipped",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="one JSON object per completion, nothing else on standard output",
    )


def _chat_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chat",
        action="store_true",
        help="prompts are turns of one conversation, answered in their order; standard input has "
        "one turn per line; "
        f"at a terminal you type them ({HINT})",
    )
    group.add_argument("--system", metavar="TEXT", help="the system's message")
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja template, instead of the model's",
    )


def sampling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="default: until the model ends its text, or the context is full",
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end token before this many")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0: always the most probable token (default 1.0)",
    )
    group.add_argument("--seed", type=int, metavar="S")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument(
        "--logit-bias", type=_json_bias, metavar="JSON", help='{"token id": bias, ...}'
    )
    group.add_argument("--allowed-token-ids", type=_ids, metavar="ID,ID,...")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    group.add_argument("--stop-token-ids", type=_ids, metavar="ID,ID,...")
    group.add_argument(
        "--include-stop",
        action="store_true",
        default=None,
        help="keep what ended the text in the text",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None)
    group.add_argument("--n", type=int, metavar="N", help="completions per prompt")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="log-probabilities with K alternatives (in --json)",
    )
    group.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="the same of the prompt's tokens (in --json)",
    )
    _structure_flags(group.add_mutually_exclusive_group())
    group.add_argument(
        "--echo", action="store_true", default=None, help="text begins with the prompt"
    )


def _structure_flags(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        "--json-schema",
        type=_text_of_file,
        metavar="FILE",
        help="text is JSON that this schema allows",
    )
    group.add_argument(
        "--json-object", action="store_true", default=None, help="text is a JSON object"
    )
    group.add_argument(
        "--regex", metavar="REGEX", help="text matches this expression (Rust's syntax), as a whole"
    )
    group.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="text is one of these; given several times",
    )
    group.add_argument(
        "--lark",
        type=_text_of_file,
        metavar="FILE",
        help="text follows this grammar (llguidance's Lark)",
    )


def size_flags(group: argparse._ArgumentGroup) -> None:
    """What decides an engine's shapes: fields of EngineOptions."""
    group.add_argument("--prefer", choices=list(PRESETS), help="default: balanced")
    group.add_argument("--max-batch", type=int, metavar="N", help="sequences that run together")
    group.add_argument(
        "--step-tokens", type=int, metavar="N", help="the most tokens one step computes"
    )
    group.add_argument(
        "--decode-steps",
        type=int,
        metavar="N",
        help="decodes per launch, when nobody else could run",
    )
    group.add_argument(
        "--kv",
        metavar="DTYPE",
        help=f"of the KV cache: auto (as the weights), {', '.join(PAGE_DTYPES)}",
    )
    group.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help="tokens per page of the KV cache (64; 128 in int8 and fp8)",
    )
    group.add_argument("--cache-tokens", type=int, metavar="N", help="size of the KV cache")
    group.add_argument(
        "--max-context", type=int, metavar="N", help="the longest prompt plus output"
    )
    group.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", default=None)
    group.add_argument(
        "--speculate",
        metavar="HOW",
        help=f"draft tokens and verify several in a step, where that pays: "
        f"{', '.join(PROPOSERS)} (default: off)",
    )
    group.add_argument(
        "--draft-tokens", type=int, metavar="N", help=f"of a row in a step, at most ({DRAFTED})"
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="same tokens bit for bit, whatever the load",
    )
    group.add_argument("--attention", help="auto, or one by name: reference, gpu, tpu")
    group.add_argument(
        "--grouped-matmul",
        help="of a mixture of experts: auto, or one by name: reference, gpu, tpu",
    )
    group.add_argument(
        "--quantized-matmul", help="of int4 in groups: auto, or one by name: reference, gpu, tpu"
    )


def engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    group.add_argument(
        "--weights",
        default="auto",
        metavar="FORM",
        help="auto (as stored), int8, fp8, int4, or int4 in groups: int4-g32, int4-g64, "
        "int4-g128; with activations, "
        "where the chip multiplies such numbers: w8a8-int8, w8a8-fp8; +head behind it quantizes "
        "the head as well",
    )
    size_flags(group)
    group.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="with --speculate draft: checkpoint folder of a smaller model with the same tokens",
    )
    group.add_argument(
        "--data", type=int, default=1, help="mesh: devices to split rows and pages over"
    )
    group.add_argument(
        "--expert", type=int, default=1, help="mesh: the same, and experts beside them"
    )
    group.add_argument(
        "--tensor",
        type=int,
        default=1,
        help="mesh: tensor parallelism (with fewer kv heads, several devices hold one)",
    )
    group.add_argument(
        "--compilation-cache",
        type=Path,
        metavar="DIR",
        help="where compiled steps are kept (default: the user's cache)",
    )


def hosts_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--hosts", type=int, metavar="N", help="how many")
    group.add_argument(
        "--host-index", type=int, metavar="I", help="this one's number, from 0 on; host 0 leads"
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of host 0, where the others find it"
    )
    group.add_argument(
        "--pod",
        action="store_true",
        help="ask the environment instead: a TPU slice, a LeaderWorkerSet, Slurm",
    )
    group.add_argument(
        "--control-port",
        type=int,
        default=0,
        metavar="N",
        help="of host 0, for its followers (default: any)",
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="until all hosts are there (300 s)",
    )


def _text_of_file(name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(
            f"{name}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids like 1,2,3"
        ) from None


def _json_bias(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object like {{"17": -1.5}}') from None


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    given = {
        f.name: getattr(args, f.name)
        for f in fields(SamplingParams)
        if getattr(args, f.name, None) is not None
    }
    for name in ("logprobs", "prompt_logprobs"):
        if name in given and not args.json:
            raise RequestError(f"--{name.replace('_', '-')}", "is shown in JSON only (add --json)")
    for kind in KINDS:
        if (value := getattr(args, kind)) is not None:
            given["structure"] = Structure.of(kind, value, f"--{kind.replace('_', '-')}")
    return SamplingParams(**given)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    given = {
        f.name: getattr(args, f.name)
        for f in fields(EngineOptions)
        if getattr(args, f.name, None) is not None
    }
    return EngineOptions(**given)


def draft_model(args: argparse.Namespace) -> Path | None:
    """ConfigError on several hosts."""
    if args.draft_model and (args.hosts or args.pod):
        raise ConfigError(
            "--draft-model: draft models are not built in for several hosts (--speculate ngram is)"
        )
    return args.draft_model


def check_chat_flags(args: argparse.Namespace, params: SamplingParams) -> None:
    """RequestError for flags that a conversation has no use for, and those that only a conversation
    has.
    """
    if not args.chat:
        for flag in ("system", "chat_template"):
            if getattr(args, flag) is not None:
                raise RequestError(
                    f"--{flag.replace('_', '-')}", "is for a conversation (add --chat)"
                )
    elif params.n > 1 or params.echo:
        flag, what = ("--n", f"is {params.n}") if params.n > 1 else ("--echo", "is given")
        raise RequestError(
            flag,
            f"{what}, but a turn of a conversation has one answer, and only that (leave it out)",
        )
