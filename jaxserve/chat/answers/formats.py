"""Which forms the answers of a model have: by the words of its chat template, or as the operator
says.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxserve.chat.answers import deepseek, hermes, llama, mistral, thinking
from jaxserve.chat.answers.call_grammar import Writing
from jaxserve.chat.answers.events import Steps
from jaxserve.chat.answers.incremental import Incoming


@dataclass(frozen=True)
class ToolForm:
    """grammar: of an answer; given the names of the functions that may be called. marks: words that
    it looks for.

    writing: the same for a model to keep to.
    """

    grammar: Callable[[Incoming, Collection[str]], Steps[None]]
    marks: tuple[str, ...]
    writing: Writing


TOOL_FORMS: Mapping[str, ToolForm] = MappingProxyType(
    {
        "llama": ToolForm(llama.llama, llama.MARKS, llama.WRITING),
        "hermes": ToolForm(hermes.hermes, hermes.MARKS, hermes.WRITING),
        "mistral": ToolForm(mistral.mistral, mistral.MARKS, mistral.WRITING),
        "deepseek": ToolForm(deepseek.deepseek, deepseek.MARKS, deepseek.WRITING),
    }
)
TOOL_PARSERS = ("auto", *TOOL_FORMS, "none")
REASONING_PARSERS = ("auto", "think", "none")
XML = "<function="  # Qwen3-Coder's calls stand between the marks of Hermes, and are no JSON
LLAMA_TURN = "<|start_header_id|>"


@dataclass(frozen=True)
class Forms:
    """tools: None where nobody knows. thinks: answers may begin with a thought."""

    tools: ToolForm | None
    thinks: bool


def choose_forms(template: str, tool_parser: str, reasoning_parser: str) -> Forms:
    """template: its source. tool_parser, reasoning_parser: of TOOL_PARSERS and REASONING_PARSERS.

    auto looks for the marks that the template itself writes: [TOOL_CALLS] is mistral, DeepSeek's
    mark of calls deepseek, <tool_call> hermes (unless <function= stands there as well), a turn of
    Llama 3 with tool_calls llama, in this order; anything else has no form. </think> is think.
    """
    name = _recognised(template) if tool_parser == "auto" else tool_parser
    thinks = (
        thinking.CLOSE in template if reasoning_parser == "auto" else reasoning_parser == "think"
    )
    return Forms(TOOL_FORMS.get(name), thinks)


def _recognised(template: str) -> str:
    if mistral.OPEN in template:
        return "mistral"
    if deepseek.BEGIN in template:
        return "deepseek"
    if hermes.OPEN in template:
        return "none" if XML in template else "hermes"
    return "llama" if LLAMA_TURN in template and "tool_calls" in template else "none"
