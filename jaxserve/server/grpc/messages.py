"""Between jaxserve.v1 messages and the service's calls and news."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.chat import Tools, answers, tools
from jaxserve.chat.answers.json_text import parse
from jaxserve.chat.messages import MAX_MESSAGES
from jaxserve.completion import Completion
from jaxserve.engine.plan import Logprob
from jaxserve.errors import JaxserveError, RequestError
from jaxserve.prompts import Prompt
from jaxserve.request import SamplingParams
from jaxserve.server.core.answer_events import AnswerEvent, Done, PromptScores, Started, Update
from jaxserve.server.core.embedding import MAX_INPUTS, embedding_requests
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.structure import Structure
from jaxserve.tokenizer import Tokenizer
from jaxserve.v1 import common_pb2, inference_pb2

# log-probabilities in one message of a stream: stock clients refuse messages of more than 4 MiB
ENTRIES = 16384
REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORTED,
    "tool_calls": common_pb2.FINISH_REASON_TOOL_CALLS,
}
CHOICES = {
    inference_pb2.TOOL_CHOICE_UNSPECIFIED: tools.AUTO,
    inference_pb2.TOOL_CHOICE_AUTO: tools.AUTO,
    inference_pb2.TOOL_CHOICE_NONE: tools.NONE,
    inference_pb2.TOOL_CHOICE_REQUIRED: tools.REQUIRED,
}
STRUCTURES = tuple(
    field.name for field in common_pb2.SamplingParams.DESCRIPTOR.oneofs_by_name["structure"].fields
)
MESSAGES = ("logit_bias", "allowed_token_ids", "stop", "stop_token_ids", *STRUCTURES)
SAMPLING = tuple(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields)
SCALARS = tuple(name for name in SAMPLING if name not in MESSAGES)


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


# ---- in


def check_known(message: Message, path: str = "") -> None:
    """RequestError for a field that this server does not know: what it asks for would be dropped in
    silence.
    """
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise RequestError(
            path or "request",
            f"has a field of number {unknown.field_number}, which is not known here",
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        inside = f"{path}.{field.name}" if path else field.name
        if field.is_repeated and len(value) > MAX_MESSAGES:
            raise RequestError(inside, f"has {len(value)} entries; the limit is {MAX_MESSAGES}")
        for i, entry in enumerate(value if field.is_repeated else [value]):
            check_known(entry, f"{inside}[{i}]" if field.is_repeated else inside)


def call_of(request: Any, limits: Limits, **given: Any) -> IncomingRequest:
    """Of a GenerateRequest, ChatRequest or one of their streams. given: more fields of Call."""
    converses = hasattr(request, "messages")
    prompt, field = _chat(request) if converses else prompt_of(request)
    params, offered = sampling_of(request.sampling), _tools(request, limits) if converses else None
    if offered and params.echo:
        raise RequestError("echo", "is asked for together with tools; leave out one of them")
    return IncomingRequest(
        prompt=prompt,
        prompt_field=field,
        params=params,
        tools=offered,
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        **given,
    )


def score_call_of(request: inference_pb2.ScoreRequest, **given: Any) -> IncomingRequest:
    """One token is generated, and forgotten: the prompt's log-probabilities come with it."""
    prompt, field = prompt_of(request)
    try:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=request.top_logprobs)
    except RequestError as error:
        raise RequestError("top_logprobs", error.problem) from None
    return IncomingRequest(
        prompt=prompt,
        prompt_field=field,
        params=params,
        request_id=request.request_id,
        priority=request.priority,
        **given,
    )


def embed_calls_of(
    request: inference_pb2.EmbedRequest, request_id: str, **given: Any
) -> list[IncomingRequest]:
    """One for each input. request_id: the client's, or the server's."""
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        raise RequestError("inputs", f"has {len(request.inputs)} entries; give 1 to {MAX_INPUTS}")
    inputs = [_input(entry, f"inputs[{i}]") for i, entry in enumerate(request.inputs)]
    return embedding_requests(
        inputs, request_id, priority=request.priority, cache_salt=request.cache_salt, **given
    )


def _input(entry: inference_pb2.EmbedInput, path: str) -> tuple[Prompt, str]:
    """The prompt, and its path in the request."""
    try:
        prompt, field = prompt_of(entry)
    except RequestError as error:
        raise error.under(path) from None
    return prompt, f"{path}.{field}"


def prompt_of(request: Any) -> tuple[Prompt, str]:
    """The prompt, and its path in the message."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text, "text"
        case "token_ids":
            return list(request.token_ids.ids), "token_ids.ids"
    raise RequestError("prompt", "is missing; set text or token_ids")


def input_of(request: inference_pb2.TokenizeRequest) -> tuple[Prompt, str]:
    """What is to be tokenized, and its path in the message."""
    match request.WhichOneof("input"):
        case "text":
            return request.text, "text"
        case "conversation":
            path = "conversation.messages"
            return messages_of(request.conversation.messages, path), path
    raise RequestError("input", "is missing; set text or conversation")


def _chat(request: Any) -> tuple[Prompt, str]:
    return messages_of(request.messages, "messages"), "messages"


def _tools(request: Any, limits: Limits) -> Tools | None:
    written = [
        {"parameters": tool.parameters, "name": tool.name + tool.description}
        for tool in request.tools
    ]
    tools.check_size(written, limits.max_tools, limits.max_tool_bytes)
    if request.tool_choice not in CHOICES:
        raise RequestError("tool_choice", f"is {request.tool_choice}, which is not known here")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    named = {"name": request.tool_name, "field": "tool_name"} if request.tool_name else {}
    choice = tools.Choice(CHOICES[request.tool_choice], **named)
    parallel = not request.HasField("parallel_tool_calls") or request.parallel_tool_calls
    return tools.tools_of(functions, choice, parallel, lambda i: f"tools[{i}]")


def _function(tool: inference_pb2.Tool, path: str) -> dict[str, Any]:
    try:
        parameters = parse(tool.parameters) if tool.parameters else None
    except ValueError as error:
        raise RequestError(f"{path}.parameters", f"is no JSON text: {error}") from None
    given = {"name": tool.name, "description": tool.description or None, "strict": tool.strict}
    return given | ({"parameters": parameters} if tool.parameters else {})


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    optional = {
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return found | {name: text for name, text in optional.items() if text}


def messages_of(messages: Iterable[inference_pb2.ChatMessage], path: str) -> list[dict[str, Any]]:
    found = [_message(message) for message in messages]
    if not found:
        raise RequestError(path, "is empty; give at least one message")
    return found


def sampling_of(message: common_pb2.SamplingParams) -> SamplingParams:
    """What was set; the rest by default."""
    given: dict[str, Any] = {
        name: getattr(message, name) for name in SCALARS if message.HasField(name)
    }
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    if message.HasField("allowed_token_ids"):
        given["allowed_token_ids"] = list(message.allowed_token_ids.ids)
    if message.stop:
        given["stop"] = list(message.stop)
    if message.stop_token_ids:
        given["stop_token_ids"] = list(message.stop_token_ids)
    if kind := message.WhichOneof("structure"):
        value = getattr(message, kind)
        given["structure"] = Structure.of(kind, list(value.texts) if kind == "choice" else value)
    return SamplingParams(**given)


def located(error: JaxserveError) -> JaxserveError:
    """With the field's path in the message: sampling parameters lie in a message of their own."""
    if isinstance(error, RequestError) and error.field.partition("[")[0] in SAMPLING:
        return error.under("sampling")
    return error


# ---- out


class Writer:
    """Messages of one request. id: the client's, or the server's. reading: how its answer is to be
    read.
    """

    def __init__(self, id: str, tokenizer: Tokenizer, reading: answers.Reading):
        self._id, self._tokenizer, self._reading = id, tokenizer, reading
        self._parsers: dict[int, answers.AnswerParser] = {}  # by choice

    def stream(self, news: AnswerEvent, event: StreamEvent) -> Iterator[Message]:
        """The messages that tell it: one, but for log-probabilities that are too large for one."""
        match news:
            case Update():
                for delta in self._deltas(news):
                    yield event(delta=delta)
            case Started():
                yield event(
                    prompt_info=inference_pb2.PromptInfo(
                        request_id=self._id,
                        prompt_tokens=news.prompt_tokens,
                        cached_prompt_tokens=news.cached_tokens,
                    )
                )
            case PromptScores():
                for start, entries in _cut(news.entries):
                    yield event(
                        prompt_logprobs=inference_pb2.PromptLogprobs(
                            start=news.start + start, entries=self.logprobs(entries)
                        )
                    )
            case Done():
                for completion in news.completions:
                    if rest := self._parser(completion.index).end():
                        yield event(
                            delta=inference_pb2.Delta(index=completion.index, **_told(rest))
                        )
                finishes = [
                    self._finish(completion, news, self._parser(completion.index).called)
                    for completion in news.completions
                ]
                yield event(
                    finish_info=inference_pb2.FinishInfo(choices=finishes, usage=self.usage(news))
                )

    def whole(self, done: Done) -> dict[str, Any]:
        """The fields of a GenerateResponse or ChatResponse."""
        return {
            "request_id": self._id,
            "choices": [self._choice(completion, done) for completion in done.completions],
            "usage": self.usage(done),
            "prompt_logprobs": self.logprobs(done.completions[0].prompt_logprobs or ()),
        }

    def usage(self, done: Done) -> common_pb2.Usage:
        usage = usage_of(done.completions[:1])
        usage.completion_tokens = sum(len(completion.token_ids) for completion in done.completions)
        return usage

    def logprobs(self, entries: Iterable[Logprob]) -> list[common_pb2.TokenLogprob]:
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
        told = _told(self._parser(update.index).feed(update.text))
        if update.logprobs is None:
            yield inference_pb2.Delta(index=update.index, token_ids=update.token_ids, **told)
            return
        for start, entries in _cut(update.logprobs) or [(0, [])]:
            tokens = update.token_ids[start : start + len(entries)]
            scores = self.logprobs(entries)
            yield inference_pb2.Delta(index=update.index, token_ids=tokens, logprobs=scores, **told)
            told = {}

    def _parser(self, index: int) -> answers.AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = answers.AnswerParser(self._reading)
        return self._parsers[index]

    def _choice(self, completion: Completion, done: Done) -> inference_pb2.Choice:
        answer = self._reading.read(completion.text)
        calls = [
            inference_pb2.ToolCall(id=c.id, name=c.name, arguments=text) for c, text in answer.calls
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


def _told(parts: Iterable[answers.Part]) -> dict[str, Any]:
    """The fields of a Delta."""
    told: dict[str, Any] = {"text": "", "reasoning_content": "", "tool_calls": []}
    for part in parts:
        match part:
            case answers.Content():
                told["text"] += part.text
            case answers.Reasoning():
                told["reasoning_content"] += part.text
            case answers.Call():
                told["tool_calls"].append(
                    inference_pb2.ToolCallDelta(index=part.index, id=part.id, name=part.name)
                )
            case answers.Arguments():
                told["tool_calls"].append(
                    inference_pb2.ToolCallDelta(index=part.index, arguments=part.text)
                )
    return told


def usage_of(completions: Iterable[Completion]) -> common_pb2.Usage:
    """Of one completion for each prompt."""
    usage = common_pb2.Usage()
    for completion in completions:
        usage.prompt_tokens += len(completion.prompt_token_ids)
        usage.cached_prompt_tokens += completion.timings.cached_tokens
        usage.completion_tokens += len(completion.token_ids)
    return usage


def _timings(completion: Completion, done: Done) -> common_pb2.Timings:
    times = completion.timings
    return common_pb2.Timings(
        queue_seconds=times.queue,
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


def _cut(entries: Sequence[Logprob]) -> list[tuple[int, Sequence[Logprob]]]:
    """Parts that fit a message each, and where they begin."""
    if not entries:
        return []
    size = max(1, ENTRIES // (1 + max(len(entry.top) for entry in entries)))
    return [(start, entries[start : start + size]) for start in range(0, len(entries), size)]
