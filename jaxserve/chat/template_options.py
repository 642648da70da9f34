"""Options of an answer that work by its chat template: how to think, how long, and variables."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

from jaxserve.chat.messages import plain
from jaxserve.config.flag_values import MAX_INT32
from jaxserve.config.option import bounds_of, flag, option
from jaxserve.errors import RequestError
from jaxserve.request_values import count

# What becomes of options of which the chat template reads no variable.
UnknownFields = Literal["ignore", "error"]
NO_EFFORT: Final = "none"
# From the least to the greatest; all but the first ask for a thought.
EFFORTS: Final = (NO_EFFORT, "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES: Final = ("low", "medium", "high")
# Variables that the server sets. A template also gets the names of special tokens.
OF_THE_SERVER: Final = frozenset({"messages", "tools", "add_generation_prompt"})
MAX_VARIABLES_BYTES: Final = 16 * 1024  # of chat_template_kwargs, as JSON


def _true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON text: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON object")
    return value


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Options of the answer to a conversation that work by the chat template.

    Which variables of the template each becomes is said in docs/clients.md, "Thinking". One of
    which the template reads no variable has no effect; whether it is refused is for whoever renders
    to say.

    Args:
        reasoning_effort: How much to think, one of EFFORTS; "none" asks for an answer without a
            thought, and all others for one with it, unless `enable_thinking` says otherwise.
        enable_thinking: Whether to think before the answer.
        thinking_budget: Number of tokens of the thought, at least 1, behind which it is closed.
        verbosity: Length of the answer, "low", "medium" or "high".
        chat_template_kwargs: Further variables of the template by name, in plain JSON values of at
            most 16 KiB; these are handed on as they are, and override what the others become.

    Raises:
        RequestError: A value is none of those, or a variable is one that the server sets.
    """

    reasoning_effort: str | None = option(
        None,
        "how much to think before the answer, where the chat template has a choice",
        choices=EFFORTS,
    )
    enable_thinking: bool | None = option(
        None,
        "think before the answer, or do not, where the chat template has a choice",
        metavar="true|false",
        parse=_true_or_false,
    )
    thinking_budget: int | None = option(
        None,
        "tokens of a thought behind which it is closed (default: no bound)",
        metavar="N",
        bounds=(1, MAX_INT32),
    )
    verbosity: str | None = option(
        None, "length of the answer, where the chat template has a choice", choices=VERBOSITIES
    )
    chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=flag(
            'variables of the chat template: {"name": value, ...}', metavar="JSON", parse=_object
        ),
    )

    def __post_init__(self) -> None:
        _check_one_of("reasoning_effort", self.reasoning_effort, EFFORTS)
        _check_one_of("verbosity", self.verbosity, VERBOSITIES)
        if self.enable_thinking not in (None, True, False):
            problem = f"is {self.enable_thinking!r:.80}; it must be true or false"
            raise RequestError("enable_thinking", problem)
        if self.thinking_budget is not None:
            count("thinking_budget", self.thinking_budget, *_BUDGET_BOUNDS)
        # A copy in plain values, which its caller cannot change behind the checks.
        variables = _plain_variables(self.chat_template_kwargs)
        object.__setattr__(self, "chat_template_kwargs", variables)

    @property
    def thinks(self) -> bool | None:
        """Choice of an answer with a thought or without; None leaves that to the template."""
        if self.enable_thinking is not None or self.reasoning_effort is None:
            return self.enable_thinking
        return self.reasoning_effort != NO_EFFORT


class TemplateFields(TypedDict, total=False):
    """Keywords of a call that stand for fields of TemplateOptions."""

    reasoning_effort: str | None
    enable_thinking: bool | None
    thinking_budget: int | None
    verbosity: str | None
    chat_template_kwargs: Mapping[str, Any]


_BUDGET_BOUNDS = tuple(map(int, bounds_of(TemplateOptions, "thinking_budget")))


def _check_one_of(name: str, value: object, words: tuple[str, ...]) -> None:
    if value is not None and value not in words:
        raise RequestError(name, f"is {value!r:.80}; it must be one of {', '.join(words)}")


def _plain_variables(given: object) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(given, Mapping):
        raise RequestError(name, f"is {given!r:.80}; give an object of variables")
    values = plain(given, name)
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RequestError(name, f"cannot be written as JSON: {error}") from None
    size = len(text.encode())
    if size > MAX_VARIABLES_BYTES:
        problem = f"has {size} bytes as JSON; the limit is {MAX_VARIABLES_BYTES}"
        raise RequestError(name, problem)
    for variable in given:
        if variable in OF_THE_SERVER:
            raise RequestError(f"{name}.{variable}", "is set by the server (leave it out)")
    return values
