"""Names of reservations of hosts, by which those of actors that are gone are found.

Ray gives a placement group back when its job ends, not when the actor ends that asked for it.
"""

from contextlib import suppress

from ray.util import list_named_actors
from ray.util.placement_group import (
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)

PREFIX = "jaxserve hosts of "
REMOVED = "REMOVED"  # state of a placement group in Ray's table


def reservation_name(owner: str) -> str:
    """Return the name of the reservation of an actor; empty for none, which Ray gives no name."""
    return f"{PREFIX}{owner}" if owner else ""


def give_back(owner: str) -> None:
    """Give the reservation of an actor back, if there is one."""
    with suppress(ValueError):  # there is none in this namespace
        remove_placement_group(get_placement_group(reservation_name(owner)))


def give_back_of_the_gone() -> None:
    """Give the reservations of all actors back that have ended, and are not started again."""
    reserved = {group["name"] for group in _groups() if group["state"] != REMOVED}
    # After the reservations: whoever had reserved by then is an actor by now.
    actors = set(list_named_actors())
    for name in reserved:
        owner = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and owner not in actors:
            give_back(owner)


def _groups() -> list[dict[str, str]]:
    return list(placement_group_table().values())
