"""Flags of the sampling parameters, which generate and the client have in common."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from jaxserve.config.option import flag_of
from jaxserve.errors import RequestError
from jaxserve.request import SamplingFields, SamplingParams
from jaxserve.structure import KINDS, Structure


def sampling_flags(group: argparse._ArgumentGroup, of_server: bool = False) -> None:
    """Add a flag for every field of SamplingParams; the value is None where it is not given.

    of_server: a server decides what is left out, by its model's defaults.
    """
    _length_flags(group)
    _choice_flags(group, of_server)
    _token_flags(group)
    _ending_flags(group)
    _report_flags(group)
    _structure_flags(group.add_mutually_exclusive_group())
    group.add_argument(
        "--echo", action="store_true", default=None, help="begin each text with the prompt"
    )


def _length_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens of a completion (default: as many as the context has room for)",
    )
    group.add_argument(
        "--min-tokens",
        type=int,
        metavar="N",
        help="fewest tokens before an end token may be chosen (default: 0)",
    )


def _choice_flags(group: argparse._ArgumentGroup, of_server: bool) -> None:
    """Add the flags that decide how the next token is drawn."""

    def default(value: int) -> str:
        return (
            f"(default: {value}, unless the server's model has another)"
            if of_server
            else f"(default: {value})"
        )

    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help=f"divisor of the logits, 0 to 2; 0 always takes the most probable token {default(1)}",
    )
    group.add_argument(
        "--seed", type=int, metavar="S", help="seed of the draws (default: another one each time)"
    )
    group.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help=f"draw from the K most probable tokens; 0 draws from all {default(0)}",
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"draw from the most probable tokens that have probability P together {default(1)}",
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help=f"draw from tokens with at least P times the highest probability {default(0)}",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="factor against tokens of the prompt and the output; above 1 makes them less likely "
        f"{default(1)}",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="number subtracted from the logits of tokens in the output (default: 0)",
    )
    group.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="number subtracted from a token's logit for each time it is in the output "
        "(default: 0)",
    )


def _token_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--logit-bias",
        type=_json_bias,
        metavar="JSON",
        help='numbers to add to the logits of tokens: {"token id": number, ...}',
    )
    group.add_argument(
        "--allowed-token-ids",
        type=_ids,
        metavar="ID,ID,...",
        help="only tokens that may be chosen (default: all)",
    )


def _ending_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="text that ends the completion; may be given several times",
    )
    group.add_argument(
        "--stop-token-ids",
        type=_ids,
        metavar="ID,ID,...",
        help="tokens that end the completion, beside the model's end tokens",
    )
    group.add_argument(
        "--include-stop",
        action="store_true",
        default=None,
        help="keep the stop text or token that ended the completion in its text",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="go on after the model's end tokens",
    )
    group.add_argument("--n", type=int, metavar="N", help="completions per prompt (default: 1)")


def _report_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="log-probability of each token, with K alternatives (needs --json)",
    )
    group.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="log-probability of each token of the prompt, with K alternatives (needs --json)",
    )


def _structure_flags(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        "--json-schema",
        type=_text_of_file,
        metavar="FILE",
        help="write JSON that the schema in this file allows",
    )
    group.add_argument(
        "--json-object", action="store_true", default=None, help="write a JSON object"
    )
    group.add_argument(
        "--regex",
        metavar="REGEX",
        help="write text that matches this regular expression as a whole, in Rust's syntax",
    )
    group.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="write one of these texts; given once for each",
    )
    group.add_argument(
        "--lark",
        type=_text_of_file,
        metavar="FILE",
        help="write text that follows the grammar in this file, in llguidance's Lark",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return what the sampling flags ask for. Raises RequestError for a value out of bounds."""
    return SamplingParams(**sampling_fields(args))


def sampling_fields(args: argparse.Namespace) -> SamplingFields:
    """Return the fields whose flags are given; RequestError for flags that contradict others."""
    given: dict[str, Any] = {
        f.name: getattr(args, f.name)
        for f in fields(SamplingParams)
        if getattr(args, f.name, None) is not None
    }
    for name in ("logprobs", "prompt_logprobs"):
        if name in given and not args.json:
            raise RequestError(flag_of(name), "is shown in JSON only (add --json)")
    for kind in KINDS:
        if (value := getattr(args, kind)) is not None:
            given["structure"] = Structure.of(kind, value, flag_of(kind))
    return cast(SamplingFields, given)


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
