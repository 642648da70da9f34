"""From the service's answers to messages of jaxserve.v1."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from jaxserve.chat import answers
from jaxserve.completion import Completion
from jaxserve.engine.events import Logprob
from jaxserve.server.core.answer_events import AnswerEvent, Done, PromptScores, Started, Update
from jaxserve.tokenizer import Tokenizer
from jaxserve.v1 import common_pb2, inference_pb2

# Log-probabilities, alternatives included, in one message of a stream: clients refuse messages of
# more than 4 MiB unless they are configured otherwise.
MAX_ENTRIES = 16384
REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORTED,
    "tool_calls": common_pb2.FINISH_REASON_TOOL_CALLS,
}


class StreamEvent(Protocol):
    """The class of a stream's messages: GenerateStreamResponse or ChatStreamResponse."""

    def __call__(
        self,
        *,
        prompt_info: inference_pb2.PromptInfo | None = None,
        delta: inference_pb2.Delta | None = None,
        finish_info: inference_pb2.FinishInfo | None = None,
        prompt_logprobs: inference_pb2.PromptLogprobs | None = None,
    ) -> Message: ...


class Renderer:
    """Makes the messages of one request; holds the state of its stream.

    Args:
        id: Request id from the client, or from the server where the client gave none.
        reading: Rules that tell reasoning and tool calls from the rest of the text.
    """

    def __init__(self, id: str, tokenizer: Tokenizer, reading: answers.Reading):
        self._id = id
        self._tokenizer = tokenizer
        self._reading = reading
        self._parsers: dict[int, answers.AnswerParser] = {}  # by choice

    def stream(self, event: AnswerEvent, message: StreamEvent) -> Iterator[Message]:
        """Yield the messages of an event: one, unless its log-probabilities need several."""
        match event:
            case Update():
                for delta in self._deltas(event):
                    yield message(delta=delta)
            case Started():
                yield message(
                    prompt_info=inference_pb2.PromptInfo(
                        request_id=self._id,
                        prompt_tokens=event.prompt_tokens,
                        cached_prompt_tokens=event.cached_tokens,
                    )
                )
            case PromptScores():
                for start, entries in _split(event.entries):
                    yield message(
                        prompt_logprobs=inference_pb2.PromptLogprobs(
                            start=event.start + start, entries=self.logprobs(entries)
                        )
                    )
            case Done():
                yield from self._ending(event, message)

    def _ending(self, done: Done, message: StreamEvent) -> Iterator[Message]:
        for completion in done.completions:
            # Text that might have become a tool call is held back until here.
            rest = self._parser(completion.index).end()
            if rest:
                yield message(
                    delta=inference_pb2.Delta(index=completion.index, **_delta_fields(rest))
                )
        choices = [
            self._finish(completion, done, self._parser(completion.index).called)
            for completion in done.completions
        ]
        yield message(finish_info=inference_pb2.FinishInfo(choices=choices, usage=self.usage(done)))

    def whole(self, done: Done) -> dict[str, Any]:
        """Return the fields of a GenerateResponse or ChatResponse."""
        return {
            "request_id": self._id,
            "choices": [self._choice(completion, done) for completion in done.completions],
            "usage": self.usage(done),
            "prompt_logprobs": self.logprobs(done.completions[0].prompt_logprobs or ()),
        }

    def usage(self, done: Done) -> common_pb2.Usage:
        """Count the tokens of the prompt once, and those of all choices."""
        usage = usage_of(done.completions[:1])
        usage.completion_tokens = sum(len(completion.token_ids) for completion in done.completions)
        return usage

    def logprobs(self, entries: Iterable[Logprob]) -> list[common_pb2.TokenLogprob]:
        """Render log-probabilities with the texts of their tokens."""
        return [
            common_pb2.TokenLogprob(
                chosen=self._logprob(entry.token, entry.logprob),
                top=[self._logprob(*pair) for pair in entry.top],
            )
            for entry in entries
        ]

    def _logprob(self, token: int, logprob: float) -> common_pb2.Logprob:
        return common_pb2.Logprob(
            token_id=token, token=self._tokenizer.token_text(token), logprob=logprob
        )

    def _deltas(self, update: Update) -> Iterator[inference_pb2.Delta]:
        fields = _delta_fields(self._parser(update.index).feed(update.text))
        if update.logprobs is None:
            yield inference_pb2.Delta(index=update.index, token_ids=update.token_ids, **fields)
            return
        for start, entries in _split(update.logprobs) or [(0, [])]:
            tokens = update.token_ids[start : start + len(entries)]
            scores = self.logprobs(entries)
            yield inference_pb2.Delta(
                index=update.index, token_ids=tokens, logprobs=scores, **fields
            )
            fields = {}  # the text goes with the first message alone

    def _parser(self, index: int) -> answers.AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = answers.AnswerParser(self._reading)
        return self._parsers[index]

    def _choice(self, completion: Completion, done: Done) -> inference_pb2.Choice:
        answer = self._reading.read(completion.text)
        calls = [
            inference_pb2.ToolCall(id=call.id, name=call.name, arguments=text)
            for call, text in answer.calls
        ]
        return inference_pb2.Choice(
            index=completion.index,
            text=answer.content,
            reasoning_content=answer.reasoning,
            tool_calls=calls,
            token_ids=completion.token_ids,
            logprobs=self.logprobs(completion.logprobs or ()),
            finish=self._finish(completion, done, bool(calls)),
        )

    def _finish(self, completion: Completion, done: Done, called: bool) -> common_pb2.ChoiceFinish:
        """Return how a choice finished; its reason is the call of a tool if it `called` one."""
        finish = common_pb2.ChoiceFinish(
            index=completion.index,
            reason=REASONS[answers.ended_by(completion.finish_reason, called)],
            seed=completion.seed,
            timings=_timings(completion, done),
        )
        if isinstance(completion.stopped_by, str):
            finish.stop_string = completion.stopped_by
        elif completion.stopped_by is not None:
            finish.stop_token_id = completion.stopped_by
        return finish


def usage_of(completions: Iterable[Completion]) -> common_pb2.Usage:
    """Count the tokens of completions that have different prompts."""
    usage = common_pb2.Usage()
    for completion in completions:
        usage.prompt_tokens += len(completion.prompt_token_ids)
        usage.cached_prompt_tokens += completion.timings.cached_tokens
        usage.completion_tokens += len(completion.token_ids)
    return usage


def _delta_fields(parts: Iterable[answers.Part]) -> dict[str, Any]:
    """Return the fields of a Delta that these parts of an answer fill."""
    fields: dict[str, Any] = {"text": "", "reasoning_content": "", "tool_calls": []}
    for part in parts:
        match part:
            case answers.Content():
                fields["text"] += part.text
            case answers.Reasoning():
                fields["reasoning_content"] += part.text
            case answers.Call():
                fields["tool_calls"].append(
                    inference_pb2.ToolCallDelta(index=part.index, id=part.id, name=part.name)
                )
            case answers.Arguments():
                fields["tool_calls"].append(
                    inference_pb2.ToolCallDelta(index=part.index, arguments=part.text)
                )
    return fields


def _timings(completion: Completion, done: Done) -> common_pb2.Timings:
    times = completion.timings
    return common_pb2.Timings(
        queue_seconds=times.queue,
        # ttft is 0 for a choice that ended before its first token.
        prefill_seconds=max(0.0, times.ttft - times.queue) if times.ttft else 0.0,
        first_token_seconds=times.ttft,
        decode_seconds=times.total - times.ttft if times.ttft else 0.0,
        total_seconds=times.total,
        preemptions=times.preemptions,
        padding_share=done.padding_share,
        bucket=done.bucket,
        drafted_tokens=times.drafted_tokens,
        accepted_tokens=times.accepted_tokens,
        verifications=times.verifications,
    )


def _split(entries: Sequence[Logprob]) -> list[tuple[int, Sequence[Logprob]]]:
    """Split entries into parts that fit a message each, given with the place of their first."""
    if not entries:
        return []
    size = max(1, MAX_ENTRIES // (1 + max(len(entry.top) for entry in entries)))
    return [(start, entries[start : start + size]) for start in range(0, len(entries), size)]
