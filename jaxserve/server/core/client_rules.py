"""Rules for what clients may ask for. Each of them is a flag of the server."""

import argparse
import re
from dataclasses import dataclass

from jaxserve.config.flag_values import MAX_INT32
from jaxserve.config.option import option

MAX_PRIORITY = 100  # of either sign; a smaller number goes first


@dataclass(frozen=True)
class Priorities:
    """Priorities from `first`, which goes before all others, to `last`."""

    first: int = 0
    last: int = MAX_PRIORITY

    def __contains__(self, priority: int) -> bool:
        return self.first <= priority <= self.last

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


ANY_PRIORITY = Priorities(-MAX_PRIORITY, MAX_PRIORITY)


def priorities(text: str) -> Priorities:
    """Return the priorities that a flag's value names, such as 0:100."""
    match = re.fullmatch(r"(-?\d{1,3}):(-?\d{1,3})", text, re.ASCII)
    if match:
        found = Priorities(int(match[1]), int(match[2]))
        if found.first <= found.last and found.first in ANY_PRIORITY and found.last in ANY_PRIORITY:
            return found
    raise argparse.ArgumentTypeError(
        f"{text!r} is not FIRST:LAST, two whole numbers from -{MAX_PRIORITY} to {MAX_PRIORITY}"
    )


@dataclass(frozen=True, kw_only=True)
class ClientRules:
    """Rules for what clients may ask for, beside the bounds in Limits."""

    strict_max_tokens: bool = option(
        False,
        "refuse a max_tokens beyond what context and page pool leave; by default such an answer is "
        "as long as they leave",
    )
    least_answer_tokens: int = option(
        1024,
        "tokens that the context has to leave for an answer over /v1/responses and /v1/messages, "
        "whose clients always ask for many; of a small context a quarter is enough (default: 1024)",
        metavar="N",
        bounds=(1, MAX_INT32),
    )
    client_priorities: Priorities = option(
        Priorities(),
        "priorities that clients may ask for, within "
        f"{ANY_PRIORITY}; lower goes first (default: {Priorities()})",
        metavar="FIRST:LAST",
        parse=priorities,
    )


ANY_CLIENT = ClientRules()
