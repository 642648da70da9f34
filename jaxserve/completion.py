"""From token events to text: what a caller gets back, while it grows and when it is done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.events import FinishReason, Logprob, Times, TokenEvent
from jaxserve.request import Request
from jaxserve.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Timings:
    """Seconds. queue: until admitted; ttft: until the first token; tpot: per token after it; total:
    until the end.

    The end is known when the launch is done in which it came: with --decode-steps, up to so many
    steps later. verifications: steps that verified drafts. drafted_tokens, accepted_tokens: theirs,
    and those that were right.
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


@dataclass(frozen=True)
class Completion:
    """One finished choice. text leaves out what ended it unless include_stop; token_ids has an end
    token if one came.

    stopped_by: the stop string or token id that ended it. error: set when finish_reason is "error".
    embedding: of the prompt, D numbers that are float32; None where text is generated.
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

    def to_json(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """As plain JSON values; log-probabilities carry their tokens' text."""

        def scores(entries: tuple[Logprob, ...] | None) -> list[dict[str, Any]] | None:
            return (
                None if entries is None else [_logprob_json(entry, tokenizer) for entry in entries]
            )

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
class Piece:
    """What became final of one choice with an event. logprobs: one for each token; None where
    nobody asked.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] | None = None
    prompt_logprobs: Sequence[Logprob] | None = None


@dataclass(frozen=True)
class Delta:
    """News of one choice of one prompt; `completion` comes with the last."""

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


@dataclass
class Assembler:
    """Builds one choice's text and log-probabilities from its events. spelled: special tokens that
    are text here.
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
        """A stop string is complete: the engine has to be told."""
        return self._decoder.stopped is not None

    def push(self, event: TokenEvent) -> Piece:
        """Take in an event; returns what became final with it: nothing after a stop string."""
        known, params = self.token_count, self.request.params
        text = "" if self.pieces or not params.echo else self.prompt
        text += self._decoder.push(self._spelled(event))
        if event.finish is not None and not self.stopped:
            text += self._decoder.finish()
        self.pieces.append(text)
        self.tokens += event.tokens
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs or ()
        fresh = slice(known, self.token_count)
        return Piece(
            text,
            self.tokens[fresh],
            None if params.logprobs is None else self._trim(self.logprobs[fresh], params.logprobs),
            self._trim(event.prompt_logprobs, params.prompt_logprobs)
            if event.prompt_logprobs
            else None,
        )

    @property
    def token_count(self) -> int:
        """Tokens of the choice: all so far, or those up to the one that completed a stop string."""
        return self._decoder.stop_token_count or len(self.tokens)

    def _spelled(self, event: TokenEvent) -> Sequence[int]:
        """The event's tokens that belong to the text."""
        ended_by = event.finish.stopped_by if event.finish else None
        hidden = ended_by is not None and not self.request.params.include_stop
        return event.tokens[:-1] if hidden else event.tokens

    def completion(self, event: TokenEvent) -> Completion:
        """The finished choice; `event` carries finish and times."""
        assert event.finish is not None and event.times is not None
        params = self.request.params
        count = self.token_count
        stopped_by = self._decoder.stopped if self.stopped else event.finish.stopped_by
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt,
            index=self.index,
            text="".join(self.pieces),
            token_ids=tuple(self.tokens[:count]),
            logprobs=tuple(self._trim(self.logprobs[:count], params.logprobs))
            if params.logprobs is not None
            else None,
            prompt_logprobs=(
                tuple(self._trim(self.prompt_logprobs, params.prompt_logprobs))
                if params.prompt_logprobs is not None and self.index == 0
                else None
            ),
            finish_reason=str(FinishReason.STOP if self.stopped else event.finish.reason),
            stopped_by=stopped_by,
            seed=self.seed,
            timings=Timings.of(event.times, count),
            error=None if self.stopped else event.finish.error,
            embedding=event.embedding,
        )

    def _trim(self, entries: Sequence[Logprob], alternatives: int | None) -> list[Logprob]:
        """As many alternatives as were asked for; the device always returns the most that can be
        asked.
        """
        return [
            Logprob(e.token, e.logprob, tuple(t for t in e.top[:alternatives] if t[0] >= 0))
            for e in entries
        ]
