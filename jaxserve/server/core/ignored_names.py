"""Names of what was accepted and changed nothing, as a header or metadata of an answer holds them.

Clients choose some of the names: keys of messages, and variables of chat templates.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

HEADER = "jaxserve-ignored"  # of HTTP; of gRPC in the trailing metadata
NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
MOST_NAMES = 16
MORE = "..."


class IgnoredField(NamedTuple):
    """Field of a request that was accepted and changes nothing.

    `listed` says that the server knows the field; the names of others are the client's choice.
    """

    name: str
    listed: bool


def nameable(names: Sequence[str]) -> list[str]:
    """Return the names that a header can hold, within its bounds; MORE stands for all others."""
    kept = [name for name in names if NAME.fullmatch(name)][:MOST_NAMES]
    return kept if len(kept) == len(names) else [*kept, MORE]


def listed(names: Sequence[str]) -> str:
    """Return the value of the header."""
    return ", ".join(names)
