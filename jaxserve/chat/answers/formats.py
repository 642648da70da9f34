"""Formats of answers, chosen by the marks in the chat template or as the operator says."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxserve.chat.answers import deepseek, harmony, hermes, llama, mistral, thinking
from jaxserve.chat.answers.call_grammar import CallSyntax
from jaxserve.chat.answers.events import Parse
from jaxserve.chat.answers.incremental import IncomingText


@dataclass(frozen=True)
class ToolFormat:
    """One way in which models write tool calls.

    `parse` takes the text and the names of the functions that may be called. `marks` are the words
    that it looks for: where they are special tokens, they have to stay in the text. `syntax` is the
    same format as a grammar, for answers that are forced to follow it.
    """

    parse: Callable[[IncomingText, Collection[str]], Parse[None]]
    marks: tuple[str, ...]
    syntax: CallSyntax


HARMONY = ToolFormat(harmony.harmony, harmony.MARKS, harmony.SYNTAX)
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "llama": ToolFormat(llama.llama, llama.MARKS, llama.SYNTAX),
        "hermes": ToolFormat(hermes.hermes, hermes.MARKS, hermes.SYNTAX),
        "mistral": ToolFormat(mistral.mistral, mistral.MARKS, mistral.SYNTAX),
        "deepseek": ToolFormat(deepseek.deepseek, deepseek.MARKS, deepseek.SYNTAX),
        "harmony": HARMONY,
    }
)
TOOL_PARSERS = ("auto", *TOOL_FORMATS, "none")
REASONING_PARSERS = ("auto", "think", "none")
# Qwen3-Coder's calls stand between the marks of Hermes, but are XML and not JSON.
XML = "<function="
LLAMA_TURN = "<|start_header_id|>"


@dataclass(frozen=True)
class AnswerFormats:
    """Formats of a model's answers.

    `tools` is None where the format of calls is unknown or turned off. `thinks` is true where
    answers may begin with reasoning. `channels` is true of Harmony, whose reasoning and calls are
    messages beside that of the answer proper.
    """

    tools: ToolFormat | None
    thinks: bool
    channels: bool = False


def choose_formats(template: str, tool_parser: str, reasoning_parser: str) -> AnswerFormats:
    """Return the formats of the answers to prompts of a chat template, given its source.

    `tool_parser` is one of TOOL_PARSERS, `reasoning_parser` one of REASONING_PARSERS. "auto" looks
    for the marks that the template itself writes: <|channel|> is harmony, [TOOL_CALLS] is mistral,
    DeepSeek's mark of calls deepseek, <tool_call> hermes (unless <function= stands there as well),
    a turn of Llama 3 with tool_calls llama, in this order; anything else has no format of calls.
    </think> is think.
    """
    name = _recognised(template) if tool_parser == "auto" else tool_parser
    # The channels of a template are told apart, too, where calls are not to be read.
    channels = "harmony" in (name, name == "none" and _recognised(template))
    if reasoning_parser == "auto":
        thinks = channels or thinking.CLOSE in template
    else:
        thinks = reasoning_parser == "think"
    return AnswerFormats(TOOL_FORMATS.get(name), thinks, channels)


def _recognised(template: str) -> str:
    """Return the name of the tool parser for a template; "none" where no mark is known."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "harmony"
    if mistral.OPEN in template:
        return "mistral"
    if deepseek.BEGIN in template:
        return "deepseek"
    if hermes.OPEN in template:
        return "none" if XML in template else "hermes"
    return "llama" if LLAMA_TURN in template and "tool_calls" in template else "none"
