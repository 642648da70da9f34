"""Bodies of requests to /v1/responses, with every field of openai-python 3.57.0."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.field_types import Objects, Text
from jaxserve.server.http.other_fields import IGNORED, OTHER_NAMES
from jaxserve.server.http.types import SameFields

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
