"""A request to the engine: a prompt with its sampling parameters."""

from dataclasses import dataclass, field
from functools import cached_property

from jaxserve.errors import RequestError
from jaxserve.request_values import check_token_ids
from jaxserve.sampling_params import SamplingParams
from jaxserve.structure import Grammar

MAX_EOS_IDS = 16  # end tokens that a checkpoint may name
MAX_CLOSING = 8  # tokens that close a thought
MAX_OPENING = 4  # tokens that begin one


@dataclass(frozen=True)
class ThoughtBudget:
    """Limit on the tokens of a thought at the beginning of the output.

    Args:
        tokens: Number of tokens behind `opening`, after which the next ones are `closing`, unless
            the thought has ended before.
        end: Id of the token that ends a thought; one of `closing`.
        closing: Ids of the tokens that are put in the place of sampled ones, 1 to MAX_CLOSING.
        opening: Ids of the tokens that an output with a thought begins with, at most MAX_OPENING;
            none where the prompt has begun the thought.
        gap: Id of a token that may stand before `opening`, once; None for no token.
    """

    tokens: int
    end: int
    closing: tuple[int, ...]
    opening: tuple[int, ...] = ()
    gap: int | None = None

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for ids outside of a vocabulary, or too many tokens."""
        field = "thought_budget"
        gap = () if self.gap is None else (self.gap,)
        check_token_ids(field, (self.end, *self.closing, *self.opening, *gap), vocab_size)
        if not 1 <= len(self.closing) <= MAX_CLOSING:
            problem = f"closes a thought with {len(self.closing)} tokens; give 1 to {MAX_CLOSING}"
            raise RequestError(field, problem)
        if len(self.opening) > MAX_OPENING:
            problem = f"has {len(self.opening)} tokens that open a thought; give {MAX_OPENING}"
            raise RequestError(field, problem)
        if self.end not in self.closing:
            raise RequestError(field, "closes a thought with tokens that do not end it")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompt as token ids with everything that the engine needs to run it."""

    id: str  # unique among the requests that have not ended
    prompt: tuple[int, ...]  # plain ints, see `request_values.integers`
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: tuple[int, ...] = ()  # the model's; they end a choice unless `params.ignore_eos`
    priority: int = 0  # rank in the queue; lower goes first, and ties go by arrival
    client: str = ""  # who asks; clients that wait get rows in turn, see docs/operating.md
    salt: str = ""  # only requests of the same salt share cached pages
    # Seconds on the engine's monotonic clock. The engine does not abort the request then, its
    # caller does; the engine leaves time for that, and launches several decode steps as one only
    # when no deadline lies among them.
    deadline: float | None = None
    # Seconds on the engine's clock until which the prompt's first chunk has to be computed; later,
    # the request ends with DeadlineError. None: it may begin at any time.
    start_by: float | None = None
    # Seconds on the engine's clock at which the prompt had been tokenized; None stands for the
    # moment at which the engine gets the request.
    since: float | None = None
    grammar: Grammar | None = None  # the output follows it; None leaves the output free
    thought_budget: ThoughtBudget | None = None  # None leaves a thought as long as it will be

    def check(self, vocab_size: int, name: str = "prompt") -> None:
        """Check the prompt and the parameters against the model's vocabulary.

        Args:
            vocab_size: Number of ids; valid ones are 0 to vocab_size - 1.
            name: Field that errors about the prompt name.

        Raises:
            RequestError: An id is out of range, or the parameters leave no token to choose.
        """
        check_token_ids(name, self.prompt, vocab_size)
        self.params.check_vocabulary(vocab_size)
        if self.thought_budget is not None:
            self.thought_budget.check(vocab_size)
        allowed = self.params.allowed_token_ids
        if allowed is not None and self.params.min_tokens and self.end_ids.issuperset(allowed):
            raise RequestError(
                "allowed_token_ids", "has only end tokens, and min_tokens keeps those out"
            )

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a choice: the model's own, and `params.stop_token_ids`."""
        eos = () if self.params.ignore_eos else self.eos_ids
        return frozenset(eos) | frozenset(self.params.stop_token_ids)
