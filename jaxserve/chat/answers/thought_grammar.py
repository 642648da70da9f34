"""Grammars of thoughts before what an answer has to follow, in llguidance's dialect of Lark."""

from jaxserve.chat.answers.call_grammar import ANY_TEXT, CallContext, Lead, literal
from jaxserve.chat.answers.thinking import CLOSE, OPEN

GAP = r"/\n{0,2}/"  # between a thought and what follows it


def lead_of_thought(context: CallContext, begun: bool) -> Lead:
    """Return the lead of an answer that continues a thought, or that may begin with one.

    Args:
        begun: Whether the prompt has begun the thought.
    """
    if CLOSE in context.special:
        rules = (f"thought: TEXT {context.mark(CLOSE)}", f"TEXT: {ANY_TEXT}")
    else:
        # Lazy: the thought ends with the first mark, and not with the last one.
        rules = (f"thought[lazy]: {ANY_TEXT} {literal(CLOSE)}",)
    if begun:
        return Lead(f"thought {GAP}", rules)
    return Lead(f"({context.mark(OPEN)} thought {GAP})?", rules)
