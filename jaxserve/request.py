"""What a client asks for: a prompt and sampling parameters, with the bounds that every door
enforces.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real

from jaxserve.errors import RequestError
from jaxserve.structure import Grammar, Structure

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 32
MAX_EOS_IDS = 16  # of the model
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 2**18  # no vocabulary has more
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Processors run in this order:

    1. allowed_token_ids and structure (all others out), logit_bias (added), min_tokens (end tokens
       out until then);
    2. repetition_penalty (tokens of prompt and output), then presence_penalty and frequency_penalty
       (of the output);
    3. temperature; 4. min_p; 5. top_k; 6. top_p; then one token is drawn by Gumbel-max.

    temperature 0 takes the most probable token after 1 and 2. Log-probabilities, of chosen tokens,
    alternatives and prompt alike, are those of the model's own distribution, before any of these.

    logprobs: how many alternatives to report with the chosen token; None reports nothing, 0 only
    the chosen token's. prompt_logprobs: the same for every prompt token but the first. max_tokens
    None: as many as the context leaves. include_stop: the text keeps the stop string, or what the
    end token spells, that ended it. structure: what the text has to follow, if it is not cut off by
    max_tokens or a stop; the grammar alone says where it may end. RequestError names the field that
    is out of its bounds.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    structure: Structure | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            self._set(name, _number(name, getattr(self, name), low, high))
        for name, low, high in _COUNTS:
            if getattr(self, name) is not None:
                self._set(name, _count(name, getattr(self, name), low, high))
        for name in ("include_stop", "ignore_eos", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"is {getattr(self, name)!r}; it must be true or false")
        if self.top_p == 0:
            raise RequestError(
                "top_p", "is 0, which keeps no token; for the most probable token use temperature 0"
            )
        self._set("stop", _stop_strings(self.stop))
        self._set(
            "stop_token_ids", integers("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        )
        self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set(
                "allowed_token_ids",
                integers("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS),
            )
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids", "is empty: no token could ever be chosen")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens ({self.max_tokens})"
            )

        self._check_structure()

    def _check_structure(self) -> None:
        if self.structure is None:
            return
        if not isinstance(self.structure, Structure):
            raise RequestError("structure", f"is {self.structure!r:.80}; give a Structure")
        for name in ("min_tokens", "ignore_eos"):
            if value := getattr(self, name):
                problem = (
                    f"is {value}, but {self.structure.field} says where the text ends; "
                    f"leave out one of them"
                )
                raise RequestError(name, problem)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(
            self, name, value
        )  # frozen for everybody else: numpy's numbers become Python's here

    def check_vocabulary(self, vocab_size: int) -> None:
        """RequestError when the parameters name a token id that is not of the model's
        vocabulary."""
        sets = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in sets.items():
            check_token_ids(name, ids, vocab_size)


_RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_COUNTS = (
    ("top_k", 0, 2**31 - 1),
    ("seed", 0, MAX_SEED),
    ("min_tokens", 0, 2**31 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("n", 1, MAX_CHOICES),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


def _number(name: str, value: object, low: float, high: float) -> float:
    try:
        number = (
            float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        )
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(name, f"is {value!r:.80}; it must be a finite number")
    if not low <= number <= high:
        raise RequestError(name, f"is {value}; it must be between {low} and {high}")
    return number


def _count(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(name, f"is {value!r:.80}; it must be an integer")
    if not low <= int(value) <= high:
        raise RequestError(name, f"is {value}; it must be between {low} and {high}")
    return int(value)


def _entries(name: str, values: object, what: str) -> Iterable[object]:
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        raise RequestError(name, f"is {values!r:.80}; give a list of {what}")
    return values


def integers(name: str, values: object, limit: int | None = None) -> tuple[int, ...]:
    """A list of token ids as plain ints, whatever kind of integers it has; RequestError when it is
    something else.

    limit: how many it may have, which is asked before any of them is looked at.
    """
    ids = tuple(_entries(name, values, "token ids"))
    if limit is not None and len(ids) > limit:
        raise RequestError(name, f"has {len(ids)} ids; the limit is {limit}")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(name, f"entry {position} is {token!r:.80}; it must be an integer")
    return tuple(map(int, ids))  # type: ignore[call-overload]


def _stop_strings(values: object) -> tuple[str, ...]:
    if isinstance(values, str):
        raise RequestError("stop", "is a string; give a list of strings")
    texts = tuple(_entries("stop", values, "strings"))
    if len(texts) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"has {len(texts)} strings; the limit is {MAX_STOP_STRINGS}")
    for position, text in enumerate(texts):
        try:
            size = len(text.encode("utf-8")) if isinstance(text, str) else 0
        except UnicodeEncodeError:
            raise RequestError(
                "stop", f"entry {position} is {text!r}, which is not valid Unicode"
            ) from None
        if not 1 <= size <= MAX_STOP_BYTES:
            raise RequestError(
                "stop", f"each entry must be a string of 1 to {MAX_STOP_BYTES} bytes"
            )
    return texts  # type: ignore[return-value]


def _biases(values: object) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise RequestError(
            "logit_bias", f"is {values!r:.80}; give a mapping of token ids to numbers"
        )
    if len(values) > MAX_BIASES:
        raise RequestError("logit_bias", f"has {len(values)} entries; the limit is {MAX_BIASES}")
    return {
        token: _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        for token, bias in zip(integers("logit_bias", list(values)), values.values(), strict=True)
    }


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """RequestError naming the first id that is not in 0..vocab_size-1."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                name, f"entry {position} is {token}; the vocabulary has ids 0 to {vocab_size - 1}"
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt as token ids, on its way to the engine.

    priority: lower goes first; ties by arrival. salt: requests share cached pages only with
    requests of the same salt. deadline: on the engine's monotonic clock; whoever set it aborts the
    request then, the engine only leaves the time for that: it launches several decodes as one only
    when no deadline lies inside. since: when it had been tokenized, before it was handed over, on
    the engine's clock; None: when it reaches it. prompt: plain ints (see `integers`). eos_ids: the
    model's end tokens, which count unless `params.ignore_eos`. grammar: what the output has to
    follow; None: nothing.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: tuple[int, ...] = ()
    priority: int = 0
    salt: str = ""
    deadline: float | None = None
    since: float | None = None
    grammar: Grammar | None = None

    def check(self, vocab_size: int, name: str = "prompt") -> None:
        """RequestError when ids are out of range (`name` is the prompt's field) or the parameters
        contradict them.
        """
        check_token_ids(name, self.prompt, vocab_size)
        self.params.check_vocabulary(vocab_size)
        allowed = self.params.allowed_token_ids
        if allowed is not None and self.params.min_tokens and self.end_ids.issuperset(allowed):
            raise RequestError(
                "allowed_token_ids", "has only end tokens, and min_tokens keeps those out"
            )

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a choice."""
        eos = () if self.params.ignore_eos else self.eos_ids
        return frozenset(eos) | frozenset(self.params.stop_token_ids)
