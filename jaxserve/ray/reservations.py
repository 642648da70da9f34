"""Reservations of hosts that are given back when the process is gone that asked for them.

Ray gives a placement group back when its job ends, even where an actor asked for it that ended long
before. The actors on the hosts end with whoever started them, so the first one has the
reservation's name: a reservation whose actor is gone is nobody's.
"""

import time
from contextlib import suppress
from uuid import uuid4

from ray.util import list_named_actors
from ray.util.placement_group import (
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)

PREFIX = "jaxserve hosts "
REMOVED = "REMOVED"  # state of a placement group in Ray's table
ABANDONED_SECONDS = 10.0  # without an actor; one that was made a moment ago has none yet


def new_name() -> str:
    """Return a name for a reservation and the actor on its first host."""
    return f"{PREFIX}{uuid4()}"


class AbandonedReservations:
    """Reservations of this namespace whose actor is gone."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # time at which a name was first seen without an actor

    def give_back(self) -> None:
        """Give those back that have had no actor since an earlier call."""
        without_actor = _reserved() - set(list_named_actors())
        now = time.monotonic()
        self._since = {name: self._since.get(name, now) for name in without_actor}
        for name, since in self._since.items():
            if now - since > ABANDONED_SECONDS:
                with suppress(ValueError):  # somebody else was faster
                    remove_placement_group(get_placement_group(name))


def _reserved() -> set[str]:
    """Return the names of all reservations."""
    groups = placement_group_table().values()
    names = {group["name"] for group in groups if group["state"] != REMOVED}
    return {name for name in names if name.startswith(PREFIX)}
