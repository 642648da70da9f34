"""Every field of Anthropic's API is honoured, without effect, or refused: none is unknown."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import anthropic.types as standard
import anthropic.types.beta as beta
import pytest
from anthropic.types import message_count_tokens_params as counting
from anthropic.types import message_create_params as creating
from anthropic.types.beta import message_count_tokens_params as beta_counting
from anthropic.types.beta import message_create_params as beta_creating
from typing_extensions import is_typeddict

from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.agents.messages import blocks, settings, tools, types
from jaxserve.server.http.ignored import CACHE_HINT

# Names that the list of no release may lose: they are what agents send.
SENT = {
    types.MessagesBody: "model messages max_tokens system tools tool_choice thinking stream "
    "metadata output_config context_management temperature top_p top_k stop_sequences",
    types.CountBody: "model messages system tools tool_choice thinking output_config max_tokens",
    types.Thinking: "type budget_tokens display block_binding",
    types.OutputConfig: "effort format task_budget",
    types.ToolChoice: "type name disable_parallel_tool_use",
    blocks.TextBlock: "type text cache_control citations",
    blocks.ThinkingBlock: "type thinking signature",
    blocks.ToolUseBlock: "type id name input cache_control caller",
    blocks.ToolResultBlock: "type tool_use_id content is_error cache_control",
    blocks.SystemMessage: "role content clear_at output_config",
    tools.CustomTool: "type name description input_schema strict cache_control defer_loading "
    "allowed_callers input_examples eager_input_streaming",
}


def members(union: Any) -> Iterator[Any]:
    """Yield the objects of a union, at any depth of annotations."""
    if is_typeddict(union):
        yield union
    for each in get_args(union):
        yield from members(each)


def typed(union: Any) -> dict[str, set[str]]:
    """Return the names of the fields of a union's objects by their types."""
    found = dict[str, set[str]]()
    for member in members(union):
        hints = get_type_hints(member)
        for name in strings(hints["type"]):
            found.setdefault(name, set()).update(hints)
    return found


def strings(kind: Any) -> Iterator[str]:
    for each in get_args(kind):
        if isinstance(each, str):
            yield each
        else:
            yield from strings(each)


def listed(kind: type[Listed]) -> set[str]:
    """Return the names that a kind of object knows."""
    hint = {CACHE_HINT} if issubclass(kind, blocks.Block) else set[str]()
    return {*kind.model_fields, *kind.ignored, *kind.refused, *hint}


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_what_agents_send(kind: type[Listed]) -> None:
    assert set(SENT[kind].split()) <= listed(kind)


@pytest.mark.parametrize(
    "kind, given",
    [
        (types.MessagesBody, creating.MessageCreateParamsNonStreaming),
        (types.MessagesBody, creating.MessageCreateParamsStreaming),
        (types.MessagesBody, beta_creating.MessageCreateParamsStreaming),
        (types.CountBody, counting.MessageCountTokensParams),
        (types.CountBody, beta_counting.MessageCountTokensParams),
        (types.OutputConfig, standard.OutputConfigParam),
        (types.OutputConfig, beta.BetaOutputConfigParam),
        (types.ContextManagement, beta.BetaContextManagementConfigParam),
        (tools.CustomTool, standard.ToolParam),
        (tools.CustomTool, beta.BetaToolParam),
    ],
)
def test_fields_of_objects(kind: type[Listed], given: Any) -> None:
    assert get_type_hints(given).keys() - listed(kind) == set()


def test_no_field_has_two_lists() -> None:
    for kind in SENT:
        lists = [kind.model_fields.keys(), kind.ignored.keys(), kind.refused.keys()]
        names = [name for each in lists for name in each]
        assert len(names) == len(set(names)), kind
        assert kind.only.keys() <= kind.refused.keys()


@pytest.mark.parametrize(
    "kind, union",
    [
        (types.Thinking, standard.ThinkingConfigParam),
        (types.Thinking, beta.BetaThinkingConfigParam),
        (types.ToolChoice, standard.ToolChoiceParam),
        (types.ToolChoice, beta.BetaToolChoiceParam),
    ],
)
def test_types_of_fields(kind: type[Listed], union: Any) -> None:
    known = set(strings(kind.model_fields["type"].annotation))
    for name, given in typed(union).items():
        assert name in known and given <= listed(kind)


@pytest.mark.parametrize("union", [standard.ToolUnionParam, beta.BetaToolUnionParam])
def test_types_of_tools(union: Any) -> None:
    assert typed(union).keys() - {tools.CUSTOM} - tools.BUILT_IN == set()


@pytest.mark.parametrize(
    "whose, union",
    [
        ("user", standard.ContentBlockParam),
        ("user", beta.BetaContentBlockParam),
        (blocks.RESULT, standard.tool_result_block_param.Content),
        (blocks.RESULT, beta.beta_tool_result_block_param.Content),
        ("system", beta.beta_system_message_param.ContentBlock),
    ],
)
def test_types_of_blocks(whose: str, union: Any) -> None:
    read = {name: kind for each in blocks.KINDS.values() for name, kind in each.items()}
    for name, given in typed(union).items():
        if name in read:
            assert given <= listed(read[name])
        else:
            assert name in blocks.REFUSED
    assert not read.keys() & blocks.REFUSED.keys()


def test_messages() -> None:
    for union in (standard.MessageParam, beta.BetaMessageParam):
        for member in members(union):
            hints = get_type_hints(member)
            (role,) = strings(hints["role"])
            kind = blocks.SystemMessage if role == "system" else blocks.Message
            assert hints.keys() <= listed(kind)


def test_edits() -> None:
    hints = get_type_hints(beta.BetaContextManagementConfigParam)
    assert typed(hints["edits"]).keys() == settings.EDITS
