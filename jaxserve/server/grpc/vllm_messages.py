"""Between the messages of vllm.grpc.engine and the service's calls and news."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as pb

from jaxserve.completion import Completion
from jaxserve.engine.plan import Logprob
from jaxserve.errors import RequestError
from jaxserve.prompts import Prompt
from jaxserve.request import Request, SamplingParams
from jaxserve.server.core.answer_events import AnswerEvent, Done, PromptScores, Started, Update
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.structure import Structure

# Fields that are honoured: any other one that is set, one of a later version too, is an error.
REQUEST = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})
SAME = (
    frozenset(  # in the message as in SamplingParams; 0 and an empty list say nothing, as in vLLM
        {
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        }
        | {
            "max_tokens",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "n",
            "logprobs",
            "prompt_logprobs",
            "seed",
        }
        | {"logit_bias"}
    )
)
RENAMED = {"include_stop_str_in_output": "include_stop"}
OF_TEXT = frozenset(
    {"skip_special_tokens", "spaces_between_special_tokens"}
)  # token ids go out, the text is theirs
STRUCTURES: Mapping[str, str] = MappingProxyType(  # as here, by vLLM's name
    {
        "json_schema": "json_schema",
        "json_object": "json_object",
        "regex": "regex",
        "choice": "choice",
        "grammar": "lark",
    }
)
NO_TAGS = (
    "asks for structural tags; json_schema, json_object, regex, choice and grammar are "
    "supported (leave it out)"
)
ONE_PLACE = "asks for KV caches of other servers, which this server does not fetch (leave it out)"
WHY: Mapping[str, str] = {
    "structural_tag": NO_TAGS,
    **dict.fromkeys(("kv_transfer_params", "kv_transfer_params_json"), ONE_PLACE),
    **dict.fromkeys(
        ("mm_inputs", "extra_mm_inputs", "media_refs"),
        "is no text; only text is served (leave it out)",
    ),
    "data_parallel_rank": "names a rank; the server spreads requests itself, and tells of one "
    "rank (leave it out)",
}


# ---- in


def call_of(request: pb.GenerateRequest, **given: Any) -> IncomingRequest:
    """RequestError names the field that is wrong, or not honoured. given: more fields of Call."""
    _check_honoured(request, REQUEST, "")
    prompt, field = _prompt_of(request)
    with naming():
        params = _sampling_of(request.sampling_params)
    return IncomingRequest(
        prompt=prompt, prompt_field=field, params=params, request_id=request.request_id, **given
    )


def embed_input_of(request: pb.EmbedRequest) -> tuple[Prompt, str]:
    """The prompt, and its path in the message."""
    _check_honoured(request, frozenset({"request_id", "tokenized"}), "")
    if not request.HasField("tokenized"):
        raise RequestError("tokenized", "is missing")
    return list(request.tokenized.input_ids), "tokenized.input_ids"


@contextmanager
def naming() -> Iterator[None]:
    """Errors of sampling parameters have their path in the message."""
    try:
        yield
    except RequestError as error:
        if error.field.partition("[")[0] in SAME | STRUCTURES.keys():
            error.under("sampling_params")
        raise


def _prompt_of(request: pb.GenerateRequest) -> tuple[Prompt, str]:
    """original_text is for reading: the ids count."""
    match request.WhichOneof("input"):
        case "tokenized":
            return list(request.tokenized.input_ids), "tokenized.input_ids"
        case "text":
            return request.text, "text"
    raise RequestError("input", "is missing; set tokenized or text")


def _sampling_of(message: pb.SamplingParams) -> SamplingParams:
    """What was set; the rest by default."""
    _check_honoured(
        message, SAME | RENAMED.keys() | OF_TEXT | STRUCTURES.keys(), "sampling_params."
    )
    given: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in OF_TEXT:
            continue
        if field.name in STRUCTURES:
            value = list(value.choices) if field.name == "choice" else value
            given["structure"] = Structure.of(STRUCTURES[field.name], value, field.name)
            continue
        if field.is_repeated:
            value = dict(value) if field.name == "logit_bias" else list(value)
        given[RENAMED.get(field.name, field.name)] = value
    return SamplingParams(**given)


def _check_honoured(message: Message, known: frozenset[str], path: str) -> None:
    for field, _ in message.ListFields():
        if field.name not in known:
            raise RequestError(
                path + field.name, WHY.get(field.name, "is not honoured here (leave it out)")
            )


# ---- out


class Writer:
    """Messages of one request. streams: chunks as the tokens come; without it each choice is one
    message at the end.

    A chunk has what is new since the one before. What completes a choice has all its tokens, and in
    a stream no log-probabilities: the chunks had them, and all of them may be too large for a
    message.
    """

    def __init__(self, request: Request, streams: bool):
        self._request, self._streams = request, streams
        self._started = Started(len(request.prompt), 0)
        self._scores: list[Logprob] = []

    def messages(self, news: AnswerEvent) -> Iterator[pb.GenerateResponse]:
        match news:
            case Started():
                self._started = news
            case PromptScores() if self._streams:
                self._scores += news.entries
            case Update() if self._streams:
                yield pb.GenerateResponse(chunk=self._chunk(news))
            case Done():
                for completion in news.completions:
                    yield pb.GenerateResponse(complete=self._complete(completion))

    def _chunk(self, update: Update) -> pb.GenerateStreamChunk:
        scores, self._scores = self._scores, []  # of the prompt: with the first chunk alone
        return pb.GenerateStreamChunk(
            index=update.index,
            token_ids=update.token_ids,
            prompt_tokens=self._started.prompt_tokens,
            completion_tokens=len(update.token_ids),
            cached_tokens=self._started.cached_tokens,
            output_logprobs=self._output_logprobs(update.logprobs),
            input_logprobs=self._input_logprobs(scores),
        )

    def _complete(self, completion: Completion) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            index=completion.index,
            output_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(completion.prompt_token_ids),
            completion_tokens=len(completion.token_ids),
            cached_tokens=completion.timings.cached_tokens,
            output_logprobs=None if self._streams else self._output_logprobs(completion.logprobs),
            input_logprobs=None
            if self._streams
            else self._input_logprobs(completion.prompt_logprobs),
        )
        match completion.stopped_by:
            case str(text):
                complete.matched_stop_str = text
            case int(token) if self._is_asked_for(token):
                complete.matched_token_id = token
        return complete

    def _is_asked_for(self, token: int) -> bool:
        """One of stop_token_ids, and not the model's own end, which is no match."""
        return self._request.params.ignore_eos or token not in self._request.eos_ids

    def _output_logprobs(self, entries: Sequence[Logprob] | None) -> pb.OutputLogProbs | None:
        if not entries:
            return None
        return pb.OutputLogProbs(
            token_ids=[entry.token for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[_top(entry) for entry in entries]
            if self._request.params.logprobs
            else None,
        )

    def _input_logprobs(self, entries: Sequence[Logprob] | None) -> pb.InputLogProbs | None:
        """A prompt's first token has no log-probability."""
        if not entries:
            return None
        top = [_top(entry) for entry in entries] if self._request.params.prompt_logprobs else None
        return pb.InputLogProbs(
            token_ids=self._request.prompt,
            token_logprobs=[
                pb.InputTokenLogProb(),
                *(pb.InputTokenLogProb(value=entry.logprob) for entry in entries),
            ],
            top_logprobs=top and [pb.TopLogProbs(), *top],
        )


def _top(entry: Logprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        token_ids=[token for token, _ in entry.top],
        values=[logprob for _, logprob in entry.top],
    )
