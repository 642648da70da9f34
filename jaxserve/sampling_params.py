"""Sampling parameters, with the bounds that hold everywhere.

The Python API, the command line, gRPC and HTTP all build this class, so a value is refused with the
same text wherever it comes from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from jaxserve.config.flag_values import MAX_INT32, numbers_by_token, token_ids
from jaxserve.config.option import flag, one_of_given, option, options_of
from jaxserve.errors import RequestError
from jaxserve.names_elsewhere import SAMPLING_KEYWORDS, explains_names
from jaxserve.request_values import biases, check_token_ids, count, integers, number, strings
from jaxserve.structure import Structure, StructureForms

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 32
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 2**18  # more than any published vocabulary has
MAX_SEED = 2**64 - 1


@explains_names(SAMPLING_KEYWORDS)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters that say how tokens are chosen and where the text ends.

    Each step of the model turns logits into one token, in this order:

    1. `allowed_token_ids` and `structure` (all other tokens are masked), `logit_bias` (added),
       `min_tokens` (end tokens are masked until then);
    2. `repetition_penalty` (tokens of prompt and output), then `presence_penalty` and
       `frequency_penalty` (tokens of the output);
    3. `temperature`; 4. `min_p`; 5. `top_k`; 6. `top_p`; then one token is drawn by Gumbel-max.

    With temperature 0 the most probable token after 1 and 2 is taken. Log-probabilities (natural
    logarithms) are those of the model's own distribution, before any of these steps, for chosen
    tokens, alternatives and prompt tokens alike.

    Args:
        temperature: Divisor of the logits, 0.0 to 2.0; 0 is greedy decoding.
        top_k: Number of most probable tokens to draw from; 0 means all.
        top_p: Probability mass to draw from, above 0.0 and at most 1.0.
        min_p: Least probability of a token as a share of the most probable one's, 0.0 to 1.0.
        repetition_penalty: Factor, 0.01 to 100.0, against tokens of prompt and output; 1 is off.
        presence_penalty: Amount, -2.0 to 2.0, taken once from the logits of tokens of the output.
        frequency_penalty: Amount, -2.0 to 2.0, taken as often as the token is in the output.
        logit_bias: Amounts, -100.0 to 100.0, added to logits by token id; at most 1,024 entries.
        allowed_token_ids: Ids of the only tokens that may be chosen; None allows all.
        seed: Seed of the random draws, 0 to 2**64 - 1; None lets the engine choose one.
        stop: Up to 16 strings of 1 to 256 UTF-8 bytes that end the text, or a single one.
        stop_token_ids: Ids of up to 32 tokens that end the text.
        include_stop: Keep in the text the stop string, or the spelling of the token, that ended it.
        ignore_eos: Go on after the model's own end tokens.
        min_tokens: Number of tokens before which no end token is chosen.
        max_tokens: Limit on the tokens of the output, at least 1; None is what the context leaves.
        n: Number of independent choices per prompt, 1 to 16.
        logprobs: Number of alternatives, 0 to 20, to report with the log-probability of every
            chosen token; None reports nothing.
        prompt_logprobs: Number of alternatives, 0 to 20, to report with the log-probability of
            every prompt token but the first; None reports nothing.
        echo: Begin the text with the prompt.
        structure: Schema, grammar or expression that the text follows unless `max_tokens` or a stop
            cuts it off. The structure alone says where the text may end.

    Raises:
        RequestError: A parameter is out of its bounds, or contradicts another one. The error names
            the parameter as its field.
    """

    max_tokens: int | None = option(
        None,
        "most tokens of a completion (default: as many as the context has room for)",
        metavar="N",
        bounds=(1, MAX_INT32),
    )
    min_tokens: int = option(
        0,
        "fewest tokens before an end token may be chosen (default: 0)",
        metavar="N",
        bounds=(0, MAX_INT32),
    )
    temperature: float = option(
        1.0,
        "divisor of the logits, 0 to 2; 0 always takes the most probable token (default: 1)",
        metavar="X",
        bounds=(0.0, 2.0),
    )
    seed: int | None = option(
        None,
        "seed of the draws (default: another one each time)",
        metavar="S",
        bounds=(0, MAX_SEED),
    )
    top_k: int = option(
        0,
        "draw from the K most probable tokens; 0 draws from all (default: 0)",
        metavar="K",
        bounds=(0, MAX_INT32),
    )
    top_p: float = option(
        1.0,
        "draw from the most probable tokens that have probability P together (default: 1)",
        metavar="P",
        bounds=(0.0, 1.0),
    )
    min_p: float = option(
        0.0,
        "draw from tokens with at least P times the highest probability (default: 0)",
        metavar="P",
        bounds=(0.0, 1.0),
    )
    repetition_penalty: float = option(
        1.0,
        "factor against tokens of the prompt and the output; above 1 makes them less likely "
        "(default: 1)",
        metavar="X",
        bounds=(0.01, 100.0),
    )
    presence_penalty: float = option(
        0.0,
        "number subtracted from the logits of tokens in the output (default: 0)",
        metavar="X",
        bounds=(-2.0, 2.0),
    )
    frequency_penalty: float = option(
        0.0,
        "number subtracted from a token's logit for each time it is in the output (default: 0)",
        metavar="X",
        bounds=(-2.0, 2.0),
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata=flag(
            'numbers to add to the logits of tokens: {"token id": number, ...}',
            metavar="JSON",
            parse=numbers_by_token,
        ),
    )
    allowed_token_ids: Sequence[int] | None = option(
        None, "only tokens that may be chosen (default: all)", metavar="ID,ID,...", parse=token_ids
    )
    stop: Sequence[str] = option(
        (), "text that ends the completion; may be given several times", metavar="TEXT"
    )
    stop_token_ids: Sequence[int] = option(
        (),
        "tokens that end the completion, beside the model's end tokens",
        metavar="ID,ID,...",
        parse=token_ids,
    )
    include_stop: bool = option(
        False, "keep the stop text or token that ended the completion in its text"
    )
    ignore_eos: bool = option(False, "go on after the model's end tokens")
    n: int = option(1, "completions per prompt (default: 1)", metavar="N", bounds=(1, MAX_CHOICES))
    logprobs: int | None = option(
        None,
        "log-probability of each token, with K alternatives (needs --json)",
        metavar="K",
        bounds=(0, MAX_LOGPROBS),
    )
    prompt_logprobs: int | None = option(
        None,
        "log-probability of each token of the prompt, with K alternatives (needs --json)",
        metavar="K",
        bounds=(0, MAX_LOGPROBS),
    )
    structure: Structure | None = field(default=None, metadata=one_of_given(StructureForms))
    echo: bool = option(False, "begin each text with the prompt")

    def __post_init__(self) -> None:
        if isinstance(self.top_k, int) and self.top_k == -1:  # what vLLM calls all
            raise RequestError("top_k", "is -1; 0 stands for all tokens")
        for name, bounds, may_be_none in _BOUNDED:
            value = getattr(self, name)
            if value is not None or not may_be_none:
                check = number if isinstance(bounds[0], float) else count
                self._set(name, check(name, value, *bounds))
        for name in ("include_stop", "ignore_eos", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"is {getattr(self, name)!r}; it must be true or false")
        if self.top_p == 0:
            raise RequestError(
                "top_p", "is 0, which keeps no token; for the most probable token use temperature 0"
            )
        self._set("stop", strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES))
        stop_ids = integers("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        self._set("stop_token_ids", stop_ids)
        self._set("logit_bias", biases("logit_bias", self.logit_bias, MAX_BIASES))
        if self.allowed_token_ids is not None:
            allowed = integers("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
            self._set("allowed_token_ids", allowed)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids", "is empty: no token could ever be chosen")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})"
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
                    "leave out one of them"
                )
                raise RequestError(name, problem)

    def _set(self, name: str, value: object) -> None:
        # The class is frozen for its users; only __post_init__ makes NumPy numbers plain ones.
        object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that every token id in the parameters belongs to the model's vocabulary.

        Args:
            vocab_size: Number of ids; valid ones are 0 to vocab_size - 1.

        Raises:
            RequestError: A parameter names an id outside of the vocabulary.
        """
        sets = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in sets.items():
            check_token_ids(name, ids, vocab_size)


# Name and bounds of a parameter, and whether it may be None.
_BOUNDED = tuple(
    (field.name, field.metadata["bounds"], field.default is None)
    for field in options_of(SamplingParams)
    if field.metadata["bounds"]
)


class SamplingFields(TypedDict, total=False):
    """Keywords of a call that stand for single fields of SamplingParams."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    min_tokens: int
    max_tokens: int | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    structure: Structure | None
