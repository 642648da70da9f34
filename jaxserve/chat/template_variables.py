"""Variables of a chat template that the options of an answer become.

Published templates have many names for the same choice. The tables hold those of Qwen3 to 3.8,
DeepSeek-V3.1, GLM-4.5 to 5, Kimi K2.5 and K3, MiniMax-M3, gpt-oss, Granite 3 and 4, SmolLM3,
Seed-OSS, Hunyuan, Nemotron 3, Mistral Small 4, Gemma 4, EXAONE 4, Ling 3, Step 3.7 and Solar.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from jaxserve.chat.renderer import Look
from jaxserve.chat.template_options import EFFORTS, NO_EFFORT, TemplateOptions

# Variables that switch thinking, with their values for on and off.
SWITCHES: Final[Mapping[str, tuple[bool, bool]]] = MappingProxyType(
    dict.fromkeys(("enable_thinking", "thinking", "reasoning"), (True, False))
)
# Those whose values are words, of which a template compares with one pair.
WORD_SWITCHES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = MappingProxyType(
    {
        "thinking_mode": (("enabled", "disabled"), ("on", "off"), ("thinking", "chat")),
        "thinking_option": (("on", "off"),),
    }
)
# Variables that take the effort's word, and their words for no thought.
EFFORT_WORDS: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
NO_THOUGHT: Final = (NO_EFFORT, "no_think")
# Those that are true for some efforts.
EFFORT_FLAGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"low_effort": ("minimal", "low"), "medium_effort": ("medium",)}
)
# Variables that tell the model of its budget. A budget of 0 is no thought to the first.
BUDGETS: Final = ("thinking_budget", "reasoning_budget")
USUAL_EFFORT: Final = "medium"  # for a template whose only switch is the effort


@dataclass(frozen=True)
class Chosen:
    """Variables for a template.

    Attributes:
        variables: Values by name.
        ignored: Names of options of which the template reads no variable; those of
            chat_template_kwargs as "chat_template_kwargs.name".
    """

    variables: Mapping[str, Any]
    ignored: tuple[str, ...]


def says_no_thought(look: Look) -> bool:
    """Return whether an effort of a template may stand for no thought."""
    return bool(_effort_words(look) and look.sought.intersection(NO_THOUGHT))


def effort_for(options: TemplateOptions, look: Look, no_thought: str | None) -> str | None:
    """Return the effort that a template is told; None where it is told none.

    Args:
        no_thought: Effort that the template takes for no thought, one of NO_THOUGHT.
    """
    if options.thinks is False:
        return None
    if options.reasoning_effort not in (None, NO_EFFORT):
        return options.reasoning_effort
    by_effort_alone = no_thought is not None and not _has_switch(look)
    return USUAL_EFFORT if options.thinks and by_effort_alone else None


def variables_for(
    options: TemplateOptions, look: Look, effort: str | None, no_thought: str | None
) -> Chosen:
    """Return the variables of a template that options become; values of clients have no marks.

    Args:
        effort: That of effort_for, or another one in its place.
        no_thought: As in effort_for.
    """
    reads = look.variables
    variables = dict(of_switch(options.thinks, look))
    if options.thinks is False and no_thought is not None:
        variables |= dict.fromkeys(_effort_words(look), no_thought)
    if effort is not None:
        variables |= of_effort(effort, look)
    if options.verbosity and "verbosity" in reads:
        variables["verbosity"] = options.verbosity
    if options.thinking_budget is not None and options.thinks is not False:
        variables |= {name: options.thinking_budget for name in BUDGETS if name in reads}
    given = options.chat_template_kwargs
    variables |= {name: value for name, value in given.items() if name in reads}
    return Chosen(variables, tuple(_ignored(options, look, no_thought)))


def of_switch(thinks: bool | None, look: Look) -> Iterator[tuple[str, Any]]:
    """Yield the variables other than efforts that switch thinking on or off."""
    if thinks is None:
        return
    off = int(not thinks)
    yield from ((name, pair[off]) for name, pair in SWITCHES.items() if name in look.variables)
    for name, pairs in WORD_SWITCHES.items():
        known = [pair for pair in pairs if look.sought.intersection(pair)]
        if name in look.variables and known:
            yield name, known[0][off]
    if not thinks and BUDGETS[0] in look.variables:
        yield BUDGETS[0], 0


def of_effort(effort: str, look: Look) -> Iterator[tuple[str, Any]]:
    """Yield the variables that say how much to think."""
    yield from ((name, effort) for name in _effort_words(look))
    for name, efforts in EFFORT_FLAGS.items():
        if name in look.variables:
            yield name, effort in efforts


def _effort_words(look: Look) -> list[str]:
    return [name for name in EFFORT_WORDS if name in look.variables]


def _has_switch(look: Look) -> bool:
    """Return whether a variable other than the effort switches thinking."""
    return any(name in look.variables for name in (*SWITCHES, *WORD_SWITCHES, BUDGETS[0]))


def _ignored(options: TemplateOptions, look: Look, no_thought: str | None) -> Iterator[str]:
    reads = look.variables
    switches = _has_switch(look) or no_thought is not None
    has_effort = _effort_words(look) or any(name in reads for name in EFFORT_FLAGS)
    is_no_effort = options.reasoning_effort == NO_EFFORT
    if options.reasoning_effort and not (switches or (has_effort and not is_no_effort)):
        yield "reasoning_effort"
    if options.enable_thinking is not None and not switches:
        yield "enable_thinking"
    if options.verbosity and "verbosity" not in reads:
        yield "verbosity"
    for name in options.chat_template_kwargs:
        if name not in reads:
            yield f"chat_template_kwargs.{name}"


def neighbours(effort: str) -> list[str]:
    """Return the other efforts that ask for a thought, the nearest first, of two the greater."""
    index = EFFORTS.index(effort)
    others = [other for other in EFFORTS[1:] if other != effort]
    return sorted(others, key=lambda other: _distance(index, EFFORTS.index(other)))


def _distance(index: int, other: int) -> tuple[int, int]:
    return abs(index - other), -other
