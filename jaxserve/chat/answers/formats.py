"""Formats of answers, chosen by the marks in the chat template or as the operator says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.chat.answers import (
    deepseek,
    glm45,
    harmony,
    hermes,
    kimi_k2,
    llama,
    minimax_m2,
    mistral,
    qwen3_coder,
    thinking,
)
from jaxserve.chat.answers.call_grammar import CallSyntax
from jaxserve.chat.answers.events import Parse
from jaxserve.chat.answers.incremental import IncomingText


@dataclass(frozen=True)
class ToolFormat:
    """One way in which models write tool calls.

    `parse` takes the text and the functions that may be called, with the schemas of their
    parameters. `marks` are the words that it looks for: where they are special tokens, they have to
    stay in the text. `syntax` is the same format as a grammar, for answers that are forced to
    follow it.
    """

    parse: Callable[[IncomingText, Mapping[str, Mapping[str, Any]]], Parse[None]]
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
        "qwen3_coder": ToolFormat(qwen3_coder.qwen3_coder, qwen3_coder.MARKS, qwen3_coder.SYNTAX),
        "glm45": ToolFormat(glm45.glm45, glm45.MARKS, glm45.SYNTAX),
        "minimax_m2": ToolFormat(minimax_m2.minimax_m2, minimax_m2.MARKS, minimax_m2.SYNTAX),
        "kimi_k2": ToolFormat(kimi_k2.kimi_k2, kimi_k2.MARKS, kimi_k2.SYNTAX),
    }
)
TOOL_PARSERS = ("auto", *TOOL_FORMATS, "none")
REASONING_PARSERS = ("auto", "think", "none")
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
    DeepSeek's mark of calls deepseek, <|tool_calls_section_begin|> kimi_k2, <minimax:tool_call>
    minimax_m2, <tool_call> qwen3_coder with <function=, glm45 with <arg_key>, unknown with <invoke,
    and else hermes, a turn of Llama 3 with tool_calls llama, in this order; anything else has no
    format of calls. </think> is think.
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
    if kimi_k2.BEGIN in template:
        return "kimi_k2"
    if minimax_m2.OPEN in template:
        return "minimax_m2"
    if hermes.OPEN in template:
        return _between_marks_of_hermes(template)
    return "llama" if LLAMA_TURN in template and "tool_calls" in template else "none"


def _between_marks_of_hermes(template: str) -> str:
    """Return the name of the tool parser for what a template writes between the same two marks."""
    if qwen3_coder.FUNCTION in template:
        return "qwen3_coder"
    if minimax_m2.INVOKE in template:
        return "none"  # MiniMax-M3, whose values are XML
    return "glm45" if glm45.KEY in template else "hermes"
