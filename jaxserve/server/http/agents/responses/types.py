"""Objects of requests to /v1/responses, with every field of openai-python 3.57.0."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.types import IGNORED, OTHER_NAMES, Objects, SameFields, Text

LENGTHS = ("max_tokens", "max_completion_tokens")  # names in other APIs
NO_CONVERSATIONS = "no conversations are kept (use previous_response_id)"
MAX_LABELS = 16  # of metadata; lengths in characters, as OpenAI has them
MAX_LABEL_NAME = 64
MAX_LABEL = 512
ENCRYPTED = "reasoning.encrypted_content"  # in `include`
LOGPROBS = "message.output_text.logprobs"
# Values of `include` about results of tools that OpenAI runs itself.
INCLUDED_ELSEWHERE = frozenset(
    {
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)


def _labels(value: dict[str, str]) -> dict[str, str]:
    if len(value) > MAX_LABELS:
        raise ValueError(f"has {len(value)} entries; the limit is {MAX_LABELS}")
    for name, label in value.items():
        if len(name) > MAX_LABEL_NAME or len(label) > MAX_LABEL:
            raise ValueError(
                f"has an entry of {len(name)} and {len(label)} characters; the limits are "
                f"{MAX_LABEL_NAME} and {MAX_LABEL}"
            )
    return value


Labels = Annotated[dict[Text, Text], AfterValidator(_labels)]


class ReasoningOptions(Listed):
    what: ClassVar[str] = "reasoning"
    is_of_answers: ClassVar[bool] = True
    place: ClassVar[str] = "reasoning."
    ignored: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "summary": "how to sum up the thoughts: they are given as they are",
            "generate_summary": "an older name of summary",
            "context": "which earlier thoughts the model sees: its chat template decides that",
        }
    )
    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"mode": "there is one way to run a model here"}
    )
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"mode": ("standard",)})

    effort: Text | None = None


class TextOptions(Listed):
    what: ClassVar[str] = "text"
    is_of_answers: ClassVar[bool] = True
    place: ClassVar[str] = "text."

    format: dict[str, Any] | None = None
    verbosity: Text | None = None


class TextFormat(Listed):
    """Format in `text.format`, without the schema that one of the types has."""

    what: ClassVar[str] = "text.format"
    place: ClassVar[str] = "text.format."
    ignored: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"description": "what the schema is for: the model is told in the conversation"}
    )

    type: Text
    name: Text | None = None  # of the schema; it says nothing to a model
    strict: bool | None = None  # a schema is always enforced


class InputBody(Listed):
    """Fields that requests for an answer share with those for the number of its input tokens."""

    is_of_answers: ClassVar[bool] = True
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **OTHER_NAMES,
            **{name: "max_output_tokens" for name, ours in OTHER_NAMES.items() if ours in LENGTHS},
            **dict.fromkeys(LENGTHS, "max_output_tokens"),
            **dict.fromkeys(("response_format", "verbosity"), "text"),
            **dict.fromkeys(("enable_thinking", "reasoning_effort", "thinking"), "reasoning"),
            "messages": "input",
            "system": "instructions",
        }
    )

    model: Text | None = None
    input: Any = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesBody(InputBody, SameFields):
    """Body of /v1/responses."""

    ignored: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **{name: IGNORED[name] for name in IGNORED if name not in ("metadata", "store")},
            "truncation": "how to cut a conversation: one that is too long is refused",
            "access_programs": "which of OpenAI's programs the caller is in",
            "client_metadata": "labels that Codex writes for its own statistics",
            "max_tool_calls": "how many calls of built-in tools may run: there are none",
            "stream_options": "whether events are padded to one length: none is",
        }
    )
    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "background": "an answer lives as long as its connection (stream it)",
            "background_options": "no answer runs in the background",
            "context_management": "conversations are not compacted here",
            "conversation": NO_CONVERSATIONS,
            "image": "no images are made",
            "moderation": "nothing is moderated here",
            "prompt": "there are no stored prompts here (use instructions)",
            "top_logprobs": "/v1/chat/completions has log-probabilities",
        }
    )
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "background": (False,),
            "context_management": ([],),
            "prediction": (),
            "top_logprobs": (0,),
        }
    )

    stream: bool = False
    store: bool = True
    include: Annotated[list[str], Field(fail_fast=True)] = []  # noqa: RUF012 (pydantic copies it)
    max_output_tokens: int | None = None
    metadata: Labels | None = None
    top_k: int | None = None
    thinking_budget: int | None = None
    priority: int = 0
    cache_salt: Text = ""
    request_id: Text = ""


class CountBody(InputBody):
    """Body of /v1/responses/input_tokens, in which fields of answers have no effect."""

    ignored: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **ResponsesBody.ignored,
            **dict.fromkeys(
                sorted(ResponsesBody.model_fields.keys() - InputBody.model_fields.keys()),
                "about an answer: none is made",
            ),
        }
    )
    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "conversation": NO_CONVERSATIONS,
            "personality": "there are no prepared system prompts here (use instructions)",
        }
    )


# ---- items of the input


class Item(Listed):
    """An item of the input; ids and states of items say nothing to a model."""

    place: ClassVar[str] = "input."

    type: Text | None = None
    id: Any = None
    status: Any = None


class Message(Item):
    what: ClassVar[str] = "a message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Any
    phase: Any = None  # of an answer: whether it is a comment; templates know no such thing


class ReasoningItem(Item):
    what: ClassVar[str] = "a reasoning item"
    summary: Any = None
    content: Any = None
    encrypted_content: Text | None = None


CALL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "async": "whether the tool runs beside the conversation: its result is in the input or not",
        "caller": "which part of OpenAI's service called",
    }
)


class FunctionCall(Item):
    what: ClassVar[str] = "a function_call item"
    ignored: ClassVar[Mapping[str, str]] = CALL_FIELDS

    name: Text
    arguments: Text
    call_id: Text
    namespace: Text | None = None


class CustomCall(Item):
    what: ClassVar[str] = "a custom_tool_call item"
    ignored: ClassVar[Mapping[str, str]] = CALL_FIELDS

    name: Text
    input: Text
    call_id: Text
    namespace: Text | None = None


class CallOutput(Item):
    what: ClassVar[str] = "an output of a call"
    ignored: ClassVar[Mapping[str, str]] = CALL_FIELDS

    call_id: Text
    output: Any
    name: Any = None  # of the function, which call_id says as well
    namespace: Any = None


# Types that say the same of a built-in tool, a file or the state of OpenAI's service.
OTHER_ITEMS = frozenset(
    {
        *("file_search_call", "computer_call", "computer_call_output", "web_search_call"),
        *("tool_search_call", "tool_search_output", "additional_tools", "configuration_update"),
        *("compaction", "compaction_trigger", "image_generation_call", "code_interpreter_call"),
        *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "item_reference"),
        *("program", "program_output"),
    }
)


class TextPart(Listed):
    """A text in a message, in thoughts or in the output of a call."""

    what: ClassVar[str] = "a text"
    place: ClassVar[str] = "content."
    ignored: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "prompt_cache_breakpoint": "where a prefix that is shared ends: the cache finds it out",
            "cache_control": "where a prefix that is shared ends: the cache finds it out",
        }
    )

    type: Text
    text: Text
    annotations: Any = None  # of an answer, as those below
    logprobs: Any = None


class Refusal(Listed):
    what: ClassVar[str] = "a refusal"
    place: ClassVar[str] = "content."

    type: Text
    refusal: Text


# ---- tools


TOOL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "allowed_callers": "which part of OpenAI's service may call: there is one here",
        "async": "whether the tool runs beside the conversation: its result is in the input or not",
        "defer_loading": "whether the model searches for the tool: it sees all tools at once",
        "output_schema": "what the tool returns: its results are texts to the model",
        "cache_control": "where a prefix that is shared ends: the cache finds it out",
    }
)


class FunctionTool(Listed):
    what: ClassVar[str] = "a function tool"
    place: ClassVar[str] = "tools."
    ignored: ClassVar[Mapping[str, str]] = TOOL_FIELDS

    type: Text
    name: Any = None  # tools_of checks what a function has
    description: Any = None
    parameters: Any = None
    strict: Any = None


class CustomTool(Listed):
    what: ClassVar[str] = "a custom tool"
    place: ClassVar[str] = "tools."
    ignored: ClassVar[Mapping[str, str]] = TOOL_FIELDS

    type: Text
    name: Any = None
    description: Text | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Listed):
    what: ClassVar[str] = "a namespace of tools"
    place: ClassVar[str] = "tools."

    type: Text
    name: Text
    description: Text | None = None
    tools: Objects


class CustomFormat(Listed):
    what: ClassVar[str] = "the format of a custom tool"
    place: ClassVar[str] = "tools.format."

    type: Text
    syntax: Text | None = None
    definition: Text | None = None


# Types of tools that OpenAI runs itself, or of which its models know what they are.
BUILT_IN = frozenset(
    {
        *("file_search", "computer", "computer_use_preview", "computer_use", "mcp"),
        *("web_search", "web_search_2025_08_26", "web_search_preview"),
        *("web_search_preview_2025_03_11", "code_interpreter", "programmatic_tool_calling"),
        *("image_generation", "local_shell", "shell", "tool_search", "apply_patch"),
    }
)
