"""Bodies of requests in Anthropic's API; every field that it has is listed.

The newest one is that of Anthropic's SDK for Python 2.14, with the fields that it calls beta.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field

from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.field_types import Objects, Text, Texts
from jaxserve.server.http.ignored import CACHE_HINT
from jaxserve.server.http.types import SameFields

Reasons = Mapping[str, str]
Values = Mapping[str, tuple[Any, ...]]

WHO = "who asks: nothing here counts or bills by person"
SPEED = "how fast the answer shall be: `priority` says that here"
PREVIEW = "features of Anthropic's API that are tried out: those that are here are always on"
CACHE = "where a prefix that is shared ends: the cache finds that out (cache_salt separates)"
IGNORED: Reasons = MappingProxyType(
    {
        "metadata": WHO,
        "user_profile_id": WHO,
        "workspace_id": WHO,
        "billing_policy": WHO,
        "service_tier": SPEED,
        "speed": SPEED,
        "inference_geo": "where to compute the answer: here",
        CACHE_HINT: CACHE,
        "diagnostics": "a report on the cache of prompts: usage says what was read from it",
        "fallbacks": "models that answer where the first one declines: none does",
        "fallback_credit_token": "a price after another model has declined: none does",
        "betas": PREVIEW,
        "anthropic_beta": PREVIEW,  # as clouds take it
        "anthropic_version": "a version of Anthropic's API, as clouds take it: there is one",
    }
)
REFUSED: Reasons = MappingProxyType(
    {
        "container": "no code is executed here; leave it out",
        "mcp_servers": "the server calls no other servers; offer their functions as tools",
        "thread": "no conversation is kept here; send all of its messages",
        "compaction": "no conversation is summarized here; ask for it in a message",
        "reasoning_effort": "use output_config.effort",
        "enable_thinking": "use thinking.type",
        "thinking_budget": "use thinking.budget_tokens",
        "response_format": "use output_config.format",
    }
)
ONLY: Values = MappingProxyType({"mcp_servers": ([],)})


class Thinking(Listed):
    """How to think before the answer."""

    what: ClassVar[str] = "thinking"
    is_of_answers: ClassVar[bool] = True
    place: ClassVar[str] = "thinking."
    ignored: ClassVar[Reasons] = {
        "block_binding": "what becomes of thoughts behind other messages than those they were "
        "made for: a signature is of the thought alone, so that they are accepted",
    }

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputConfig(Listed):
    """How much to think, and the form of the answer."""

    what: ClassVar[str] = "output_config"
    is_of_answers: ClassVar[bool] = True
    place: ClassVar[str] = "output_config."
    ignored: ClassVar[Reasons] = {
        "task_budget": "what a model may be told about the tokens of a whole task: max_tokens "
        "bounds each answer",
    }

    effort: Text | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Listed):
    """Choice of the tools that the answer may call, or has to."""

    what: ClassVar[str] = "tool_choice"
    place: ClassVar[str] = "tool_choice."

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class ContextManagement(Listed):
    """Edits of a conversation that grows too long; they have no effect, see `settings`."""

    what: ClassVar[str] = "context_management"
    place: ClassVar[str] = "context_management."

    edits: Objects = Field(default_factory=list)


class ConversationBody(Listed):
    """Fields that the prompt is made from."""

    is_of_answers: ClassVar[bool] = True
    ignored: ClassVar[Reasons] = IGNORED
    refused: ClassVar[Reasons] = REFUSED
    only: ClassVar[Values] = ONLY

    model: Text | None = None
    messages: Objects
    system: Any = None  # text, or blocks of it
    tools: Objects = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # former place of output_config.format
    context_management: ContextManagement | None = None
    # Extensions, as /v1/chat/completions has them.
    verbosity: Text | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class MessagesBody(ConversationBody, SameFields):
    """Body of /v1/messages; SamplingParams checks the bounds of SameFields."""

    max_tokens: int
    stream: bool = False
    stop_sequences: Texts | None = None
    stop: Texts | None = None  # another name of stop_sequences
    top_k: int | None = None
    # Extensions, as /v1/chat/completions has them.
    priority: int = 0
    cache_salt: Text = ""
    request_id: Text = ""


OF_ANSWERS: Reasons = dict.fromkeys(
    sorted(MessagesBody.model_fields.keys() - ConversationBody.model_fields.keys()),
    "about an answer: none is made",
)


class CountBody(ConversationBody):
    """Body of /v1/messages/count_tokens, in which fields of answers have no effect."""

    ignored: ClassVar[Reasons] = IGNORED | OF_ANSWERS | {"compaction": "about an answer"}
    refused: ClassVar[Reasons] = {
        name: reason for name, reason in REFUSED.items() if name != "compaction"
    }
