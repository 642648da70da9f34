"""Completions: the text that token events become, while it grows and once it is finished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jaxserve.completion_html import completion_html
from jaxserve.engine.events import FinishReason, Logprob, Times, TokenEvent
from jaxserve.names_elsewhere import COMPLETION_ATTRIBUTES, explains_names
from jaxserve.request import Request
from jaxserve.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Timings:
    """Durations and counts of one choice.

    The end of a choice is observed when its launch has returned. With --decode-steps N that is up
    to N - 1 steps after the step that made the last token.

    Attributes:
        queue: Seconds from submission to admission; 0.0 where it was never admitted.
        ttft: Seconds from submission to the first token; 0.0 where there was none.
        tpot: Seconds per token after the first.
        total: Seconds from submission to the end.
        cached_tokens: Number of prompt tokens whose pages were in the prefix cache.
        preemptions: Number of times that the choice gave its pages to another one.
        verifications: Number of steps that verified drafted tokens.
        drafted_tokens: Number of tokens that those steps verified.
        accepted_tokens: Number of drafted tokens that were accepted.
    """

    queue: float
    ttft: float
    tpot: float
    total: float
    cached_tokens: int
    preemptions: int
    verifications: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @staticmethod
    def of(times: Times, tokens: int) -> "Timings":
        """Return the durations between the moments of a choice that has `tokens` tokens."""

        # A moment is 0 until it comes: a request may end in the queue, or before its first token.
        def since(moment: float) -> float:
            return moment - times.submitted if moment else 0.0

        decode = times.finished - times.first_token if times.first_token else 0.0
        return Timings(
            queue=since(times.admitted),
            ttft=since(times.first_token),
            tpot=decode / (tokens - 1) if tokens > 1 else 0.0,
            total=since(times.finished),
            cached_tokens=times.cached,
            preemptions=times.preemptions,
            verifications=times.verifications,
            drafted_tokens=times.drafted,
            accepted_tokens=times.accepted,
        )


@explains_names(attributes=COMPLETION_ATTRIBUTES)
@dataclass(frozen=True)
class Completion:
    """One finished choice of one prompt.

    A notebook shows it as text; where log-probabilities were asked for, the less probable a token
    was, the stronger is its colour. (Not in a copy, or another process: a completion that was
    pickled, copied or changed by dataclasses.replace has left its tokenizer behind.)

    Attributes:
        prompt: Text of the prompt; for a conversation, as the chat template renders it.
        prompt_token_ids: Ids of the prompt.
        index: Number of the choice among the prompt's `n`, from 0.
        text: Generated text, without the stop string or end token unless `include_stop`.
        token_ids: Ids of the generated tokens, with the end token if one came.
        logprobs: One entry per generated token; None where they were not asked for.
        prompt_logprobs: One entry per prompt token but the first, with choice 0 only; None where
            they were not asked for.
        finish_reason: "stop", "length", "abort" or "error".
        stopped_by: Stop string or token id that ended the text; None where it ended otherwise.
        seed: Seed that the tokens were drawn with.
        timings: Durations in seconds, and counts.
        error: Error that ended the choice, with finish_reason "error"; None otherwise.
        embedding: D float32 numbers, the embedding of the prompt; None where text is generated.
    """

    prompt: str
    prompt_token_ids: tuple[int, ...]
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None
    prompt_logprobs: tuple[Logprob, ...] | None
    finish_reason: str
    stopped_by: str | int | None
    seed: int
    timings: Timings
    error: Exception | None = None
    embedding: Sequence[float] | None = None

    def _with_tokenizer(self, tokenizer: Tokenizer) -> Self:
        """Keep the model's tokenizer for _repr_html_; return the completion itself."""
        # No field: it takes no part in a comparison, in asdict or in a pickle.
        object.__setattr__(self, "_tokenizer", tokenizer)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokenizer"}

    def _repr_html_(self) -> str:
        tokenizer = vars(self).get("_tokenizer")
        return completion_html(self.prompt, self.text, self.logprobs, tokenizer)

    def to_json(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the completion as plain JSON values.

        Args:
            tokenizer: The model's, for the text of each token that has a log-probability.

        Returns:
            An object with the attributes, without `embedding`, and with `error` only where it is
            set, as a string.
        """

        def scores(entries: tuple[Logprob, ...] | None) -> list[dict[str, Any]] | None:
            if entries is None:
                return None
            return [_logprob_json(entry, tokenizer) for entry in entries]

        return {
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "logprobs": scores(self.logprobs),
            "prompt_logprobs": scores(self.prompt_logprobs),
            "finish_reason": self.finish_reason,
            "stopped_by": self.stopped_by,
            "seed": self.seed,
            "timings": vars(self.timings),
            **({"error": str(self.error)} if self.error else {}),
        }


def _logprob_json(entry: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "token": tokenizer.token_text(token), "logprob": logprob}

    return one(entry.token, entry.logprob) | {
        "top": [one(token, logprob) for token, logprob in entry.top]
    }


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text and tokens of one choice that became final with an event.

    `logprobs` has one entry per token id; each is None where log-probabilities were not asked for.
    Text may lag behind the tokens: half of a character, or the beginning of a stop string, is held
    back.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] | None = None
    prompt_logprobs: Sequence[Logprob] | None = None


@dataclass(frozen=True)
class Delta:
    """Growth of one choice of one prompt, as `LLM.stream` and `LLM.run` yield it.

    Attributes:
        prompt_index: Position of the prompt in the list that runs, from 0.
        index: Number of the choice among the prompt's `n`, from 0.
        text: Text that became final; it may be empty.
        token_ids: Ids of the tokens that became final.
        completion: The whole choice, with the last delta; None before.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


@dataclass
class Assembler:
    """Builder of one choice's text and log-probabilities from its token events.

    `spelled` maps the ids of special tokens that belong to the text, such as the marks of tool
    calls, to their spelling; other special tokens are left out of the text.
    """

    request: Request
    prompt: str
    index: int
    seed: int
    tokenizer: Tokenizer
    spelled: Mapping[int, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        params = self.request.params
        self._decoder = StreamDecoder(
            self.tokenizer, self.request.prompt, params.stop, params.include_stop, self.spelled
        )

    @property
    def stopped(self) -> bool:
        """Return whether a stop string is complete.

        The engine sees tokens and no text, so the caller has to stop the choice there.
        """
        return self._decoder.stopped is not None

    def push(self, event: TokenEvent) -> TextDelta:
        """Add an event and return what became final with it: nothing after a stop string."""
        known = self.token_count
        params = self.request.params
        text = "" if self.pieces or not params.echo else self.prompt
        text += self._decoder.push(self._spelled(event))
        if event.finish is not None and not self.stopped:
            text += self._decoder.finish()
        # Events of one launch may go on behind a stop string: token_count cuts their tokens off.
        self.pieces.append(text)
        self.tokens += event.tokens
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs or ()
        fresh = slice(known, self.token_count)
        logprobs = None
        if params.logprobs is not None:
            logprobs = self._trim(self.logprobs[fresh], params.logprobs)
        prompt_logprobs = None
        if event.prompt_logprobs:
            prompt_logprobs = self._trim(event.prompt_logprobs, params.prompt_logprobs)
        return TextDelta(text, self.tokens[fresh], logprobs, prompt_logprobs)

    @property
    def token_count(self) -> int:
        """Number of tokens so far, or up to the one that completed a stop string."""
        return self._decoder.stop_token_count or len(self.tokens)

    def _spelled(self, event: TokenEvent) -> Sequence[int]:
        """Return the event's tokens that belong to the text, without a hidden end token."""
        ended_by = event.finish.stopped_by if event.finish else None
        hidden = ended_by is not None and not self.request.params.include_stop
        return event.tokens[:-1] if hidden else event.tokens

    def completion(self, event: TokenEvent) -> Completion:
        """Return the finished choice; `event` is its last one and carries finish and times."""
        assert event.finish is not None and event.times is not None
        params = self.request.params
        count = self.token_count
        # A stop string wins over what the engine says: the choice may have run on behind it.
        stopped_by = self._decoder.stopped if self.stopped else event.finish.stopped_by
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(self._trim(self.logprobs[:count], params.logprobs))
        prompt_logprobs = None
        if params.prompt_logprobs is not None and self.index == 0:
            prompt_logprobs = tuple(self._trim(self.prompt_logprobs, params.prompt_logprobs))
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt,
            index=self.index,
            text="".join(self.pieces),
            token_ids=tuple(self.tokens[:count]),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=str(FinishReason.STOP if self.stopped else event.finish.reason),
            stopped_by=stopped_by,
            seed=self.seed,
            timings=Timings.of(event.times, count),
            error=None if self.stopped else event.finish.error,
            embedding=event.embedding,
        )._with_tokenizer(self.tokenizer)

    def _trim(self, entries: Sequence[Logprob], alternatives: int | None) -> list[Logprob]:
        """Return the entries with `alternatives` alternatives each.

        The device always returns MAX_LOGPROBS of them; negative ids are padding.
        """
        return [
            Logprob(e.token, e.logprob, tuple(t for t in e.top[:alternatives] if t[0] >= 0))
            for e in entries
        ]
