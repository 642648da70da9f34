"""Grammars of thoughts before what an answer has to follow, in llguidance's dialect of Lark."""

from collections.abc import Iterable, Mapping

from jaxserve.chat.answers.call_grammar import ANY_TEXT, CallContext, Lead, literal
from jaxserve.chat.answers.thinking import CLOSE, OPEN

GAP = r"/\n{0,2}/"  # before a thought, and between it and what follows


def lead_of_thought(context: CallContext, begun: bool, tokens: Mapping[str, int]) -> Lead:
    """Return the lead of an answer that continues a thought, or that may begin with one.

    Args:
        begun: Whether the prompt has begun the thought.
        tokens: Ids of the tokens by which marks may be written, special or not.
    """
    if CLOSE in tokens:
        rules = (f"thought: {other_tokens(context, tokens[CLOSE])}* <[{tokens[CLOSE]}]>",)
    else:
        # Lazy: the thought ends with the first mark, and not with the last one.
        rules = (f"thought[lazy]: {ANY_TEXT} {literal(CLOSE)}",)
    if begun:
        return Lead(f"thought {GAP}", rules)
    opening = f"<[{tokens[OPEN]}]>" if OPEN in tokens else literal(OPEN)
    return Lead(f"({GAP} {opening} thought {GAP})?", rules)


def other_tokens(context: CallContext, *marks: int) -> str:
    """Return the expression of any token that is neither special nor one of the marks.

    It stands for text that may be cut inside of a character, as no expression of text may be.
    """
    return f"<[^{','.join(_ranges({*context.special.values(), *marks}))}]>"


def _ranges(ids: Iterable[int]) -> list[str]:
    """Return ids as llguidance takes them: single ones, and ranges of neighbours."""
    found: list[tuple[int, int]] = []
    for id in sorted(ids):
        if found and found[-1][1] == id - 1:
            found[-1] = (found[-1][0], id)
        else:
            found.append((id, id))
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]
