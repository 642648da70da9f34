"""From messages of jaxserve.v1 to the service's requests."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from jaxserve.chat import TemplateOptions, Tools, tools
from jaxserve.chat.answers.json_text import parse as parse_json
from jaxserve.chat.template_options import MAX_VARIABLES_BYTES
from jaxserve.errors import JaxserveError, RequestError
from jaxserve.prompts import Prompt
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.server.core.embedding import MAX_INPUTS, embedding_requests
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.fields import set_fields
from jaxserve.structure import Structure
from jaxserve.v1 import common_pb2, inference_pb2

CHOICES = {
    inference_pb2.TOOL_CHOICE_UNSPECIFIED: tools.AUTO,
    inference_pb2.TOOL_CHOICE_AUTO: tools.AUTO,
    inference_pb2.TOOL_CHOICE_NONE: tools.NONE,
    inference_pb2.TOOL_CHOICE_REQUIRED: tools.REQUIRED,
}
_SAMPLING = common_pb2.SamplingParams.DESCRIPTOR
SAMPLING = frozenset(field.name for field in _SAMPLING.fields)
TEMPLATE = frozenset(field.name for field in fields(TemplateOptions))
VARIABLES = "chat_template_kwargs"
STRUCTURES = frozenset(field.name for field in _SAMPLING.oneofs_by_name["structure"].fields)


def parse_request(
    request: Any, limits: Limits, defaults: SamplingFields, **fields: Any
) -> IncomingRequest:
    """Parse a GenerateRequest, a ChatRequest or the request of one of their streams.

    Args:
        defaults: Values of the sampling parameters that the request leaves open.
        **fields: Further fields of IncomingRequest.

    Raises:
        RequestError: The request is not valid.
    """
    is_chat = hasattr(request, "messages")
    if is_chat:
        prompt, prompt_field = parse_messages(request.messages, "messages")
    else:
        prompt, prompt_field = parse_prompt(request)
    params = parse_sampling(request.sampling, defaults)
    offered = _parse_tools(request, limits) if is_chat else None
    if offered and params.echo:
        raise RequestError("echo", "is asked for together with tools; leave out one of them")
    return IncomingRequest(
        prompt=prompt,
        prompt_field=prompt_field,
        params=params,
        tools=offered,
        options=_parse_options(request) if is_chat else TemplateOptions(),
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        **fields,
    )


def parse_score_request(request: inference_pb2.ScoreRequest, **fields: Any) -> IncomingRequest:
    """Parse a ScoreRequest into a request that generates one token.

    The prompt's log-probabilities come with this token, which is dropped.
    """
    prompt, prompt_field = parse_prompt(request)
    try:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=request.top_logprobs)
    except RequestError as error:
        raise RequestError("top_logprobs", error.problem) from None
    return IncomingRequest(
        prompt=prompt,
        prompt_field=prompt_field,
        params=params,
        request_id=request.request_id,
        priority=request.priority,
        **fields,
    )


def parse_embed_request(
    request: inference_pb2.EmbedRequest, request_id: str, **fields: Any
) -> list[IncomingRequest]:
    """Parse an EmbedRequest into one request for each input.

    Args:
        request_id: Id from the client, or from the server where the client gave none.
    """
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        raise RequestError("inputs", f"has {len(request.inputs)} entries; give 1 to {MAX_INPUTS}")
    inputs = [_parse_input(entry, f"inputs[{i}]") for i, entry in enumerate(request.inputs)]
    return embedding_requests(
        inputs, request_id, priority=request.priority, cache_salt=request.cache_salt, **fields
    )


def _parse_input(entry: inference_pb2.EmbedInput, path: str) -> tuple[Prompt, str]:
    try:
        prompt, field = parse_prompt(entry)
    except RequestError as error:
        raise error.under(path) from None
    return prompt, f"{path}.{field}"


def parse_prompt(request: Any) -> tuple[Prompt, str]:
    """Return the prompt of a message, and its path in the message."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text, "text"
        case "token_ids":
            return list(request.token_ids.ids), "token_ids.ids"
    raise RequestError("prompt", "is missing; set text or token_ids")


def parse_tokenize_input(
    request: inference_pb2.TokenizeRequest,
) -> tuple[Prompt, str, TemplateOptions]:
    """Return the text or conversation to be tokenized, its path in the message, and its options."""
    match request.WhichOneof("input"):
        case "text":
            return request.text, "text", TemplateOptions()
        case "conversation":
            conversation = request.conversation
            prompt, path = parse_messages(conversation.messages, "conversation.messages")
            try:
                return prompt, path, _parse_options(conversation)
            except RequestError as error:
                raise error.under("conversation") from None
    raise RequestError("input", "is missing; set text or conversation")


def parse_messages(messages: Iterable[inference_pb2.ChatMessage], path: str) -> tuple[Prompt, str]:
    """Return a conversation as chat templates take it, and its path in the message."""
    found = [_parse_message(message) for message in messages]
    if not found:
        raise RequestError(path, "is empty; give at least one message")
    return found, path


def _parse_message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
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
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        found["reasoning_content"] = message.reasoning_content
    return found


def _parse_options(message: Any) -> TemplateOptions:
    """Return the options that a ChatRequest, the request of its stream or a Conversation sets."""
    found = {name: value for name, value in set_fields(message) if name in TEMPLATE}
    if VARIABLES in found:
        found[VARIABLES] = _parse_variables(found[VARIABLES])
    return TemplateOptions(**found)


def _parse_variables(text: str) -> Any:
    size = len(text.encode())
    if size > MAX_VARIABLES_BYTES:  # bounds the work of parsing
        raise RequestError(VARIABLES, f"has {size} bytes; the limit is {MAX_VARIABLES_BYTES}")
    try:
        return parse_json(text)
    except ValueError as error:
        raise RequestError(VARIABLES, f"is no JSON text: {error}") from None


def _parse_tools(request: Any, limits: Limits) -> Tools | None:
    # Before any schema is parsed: this bounds the work that a request can cause.
    sized = [
        {"parameters": tool.parameters, "name": tool.name + tool.description}
        for tool in request.tools
    ]
    tools.check_size(sized, limits.max_tools, limits.max_tool_bytes)
    if request.tool_choice not in CHOICES:
        raise RequestError("tool_choice", f"is {request.tool_choice}, which is not known here")
    functions = [_parse_function(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    named = {"name": request.tool_name, "field": "tool_name"} if request.tool_name else {}
    choice = tools.Choice(CHOICES[request.tool_choice], **named)
    parallel = not request.HasField("parallel_tool_calls") or request.parallel_tool_calls
    return tools.tools_of(functions, choice, parallel, lambda i: f"tools[{i}]")


def _parse_function(tool: inference_pb2.Tool, path: str) -> dict[str, Any]:
    """Return a function as OpenAI's API has it."""
    found: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or None,
        "strict": tool.strict,
    }
    if tool.parameters:
        try:
            found["parameters"] = parse_json(tool.parameters)
        except ValueError as error:
            raise RequestError(f"{path}.parameters", f"is no JSON text: {error}") from None
    return found


def parse_sampling(message: common_pb2.SamplingParams, defaults: SamplingFields) -> SamplingParams:
    """Return the sampling parameters that were set, and the defaults of others.

    RequestError is raised for one that is out of range.
    """
    found: dict[str, Any] = {**defaults}
    for name, value in set_fields(message):
        if name in STRUCTURES:
            if name == "choice":
                value = list(value.texts)
            found["structure"] = Structure.of(name, value)
        elif name == "allowed_token_ids":
            found[name] = list(value.ids)
        else:
            found[name] = value
    return SamplingParams(**found)


def with_message_path(error: JaxserveError) -> JaxserveError:
    """Give errors of sampling parameters the path in the request, where `sampling` holds them."""
    if isinstance(error, RequestError) and error.field.partition("[")[0] in SAMPLING:
        return error.under("sampling")
    return error
