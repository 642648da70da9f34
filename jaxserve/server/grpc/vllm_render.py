"""From the service's answers to messages of vllm.grpc.engine."""

from collections.abc import Iterator, Sequence

from smg_grpc_proto import vllm_engine_pb2 as pb

from jaxserve.completion import Completion
from jaxserve.engine.events import Logprob
from jaxserve.request import Request
from jaxserve.server.core.answer_events import AnswerEvent, Done, PromptScores, Started, Update


class VllmRenderer:
    """Makes the messages of one request.

    In a stream, a chunk has what is new since the chunk before. The message that completes a choice
    has all its tokens; its log-probabilities only without streaming, since the chunks had them and
    all of them may be too large for one message.

    Args:
        streams: Whether chunks are sent as tokens come, not one message per choice at the end.
    """

    def __init__(self, request: Request, streams: bool):
        self._request = request
        self._streams = streams
        self._started = Started(len(request.prompt), 0)
        self._prompt_scores: list[Logprob] = []  # that no chunk has had yet

    def messages(self, event: AnswerEvent) -> Iterator[pb.GenerateResponse]:
        """Yield the messages of an event, which may be none."""
        match event:
            case Started():
                self._started = event
            case PromptScores() if self._streams:
                self._prompt_scores += event.entries
            case Update() if self._streams:
                yield pb.GenerateResponse(chunk=self._chunk(event))
            case Done():
                for completion in event.completions:
                    yield pb.GenerateResponse(complete=self._complete(completion))

    def _chunk(self, update: Update) -> pb.GenerateStreamChunk:
        # The prompt's log-probabilities go with the first chunk alone.
        prompt_scores = self._prompt_scores
        self._prompt_scores = []
        return pb.GenerateStreamChunk(
            index=update.index,
            token_ids=update.token_ids,
            prompt_tokens=self._started.prompt_tokens,
            completion_tokens=len(update.token_ids),
            cached_tokens=self._started.cached_tokens,
            output_logprobs=self._output_logprobs(update.logprobs),
            input_logprobs=self._input_logprobs(prompt_scores),
        )

    def _complete(self, completion: Completion) -> pb.GenerateComplete:
        output_logprobs: pb.OutputLogProbs | None = None
        input_logprobs: pb.InputLogProbs | None = None
        if not self._streams:
            output_logprobs = self._output_logprobs(completion.logprobs)
            input_logprobs = self._input_logprobs(completion.prompt_logprobs)
        complete = pb.GenerateComplete(
            index=completion.index,
            output_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(completion.prompt_token_ids),
            completion_tokens=len(completion.token_ids),
            cached_tokens=completion.timings.cached_tokens,
            output_logprobs=output_logprobs,
            input_logprobs=input_logprobs,
        )
        match completion.stopped_by:
            case str(text):
                complete.matched_stop_str = text
            case int(token) if self._is_asked_for(token):
                complete.matched_token_id = token
        return complete

    def _is_asked_for(self, token: int) -> bool:
        """Return whether an end token is one of stop_token_ids, and not the model's own end."""
        return self._request.params.ignore_eos or token not in self._request.eos_ids

    def _output_logprobs(self, entries: Sequence[Logprob] | None) -> pb.OutputLogProbs | None:
        if not entries:
            return None
        asks_for_top = bool(self._request.params.logprobs)
        return pb.OutputLogProbs(
            token_ids=[entry.token for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[_top(entry) for entry in entries] if asks_for_top else None,
        )

    def _input_logprobs(self, entries: Sequence[Logprob] | None) -> pb.InputLogProbs | None:
        if not entries:
            return None
        asks_for_top = bool(self._request.params.prompt_logprobs)
        # The prompt's first token has no log-probability: an empty message stands for it.
        token_logprobs = [pb.InputTokenLogProb()]
        token_logprobs += [pb.InputTokenLogProb(value=entry.logprob) for entry in entries]
        top_logprobs = [pb.TopLogProbs(), *map(_top, entries)] if asks_for_top else None
        return pb.InputLogProbs(
            token_ids=self._request.prompt, token_logprobs=token_logprobs, top_logprobs=top_logprobs
        )


def _top(entry: Logprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        token_ids=[token for token, _ in entry.top], values=[logprob for _, logprob in entry.top]
    )
