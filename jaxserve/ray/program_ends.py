"""Ends of a program on the hosts of a group."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from jaxserve.ray.host_process import ERROR, Ended

LOOK_SECONDS = 0.2  # for the hosts to answer
SILENT_SECONDS = 60.0  # without an answer, after which a host counts as lost
LAST_SECONDS = 10.0  # for the hosts to answer where the program has been stopped
LOST = -9  # exit code, as if the program had been killed there


class ProgramEnds:
    """Ends of a program on each host, as far as they are known; what was known once stays.

    Hosts are asked by short calls. Before Ray ends an actor in good order it waits for the calls
    that this actor has made, so none may last as long as a program.

    Args:
        actors: Handles of HostProcess.
    """

    def __init__(self, actors: Sequence[Any]):
        self._actors = actors
        self._known: list[Ended | None] = [None] * len(actors)
        self._asked: dict[Any, tuple[int, float]] = {}  # call -> host, and when it was asked

    def look(self, seconds: float = LOOK_SECONDS) -> list[Ended | None]:
        """Return the end on every host; None where the program runs, or no answer came in time."""
        self._ask()
        calls = list(self._asked)
        if not calls:
            return self._known
        answered, silent = ray.wait(calls, num_returns=len(calls), timeout=seconds)
        for call in answered:
            host, _ = self._asked.pop(call)
            self._known[host] = _end_of(call)
        now = time.monotonic()
        for call in silent:
            host, since = self._asked[call]
            if now - since > SILENT_SECONDS:
                self._known[host] = lost(f"it has not answered for {SILENT_SECONDS:g} s")
        return self._known

    def at_last(self) -> list[Ended]:
        """Return the end on every host, once the program is stopped everywhere."""
        return [end or lost("it does not answer") for end in self.look(LAST_SECONDS)]

    def _ask(self) -> None:
        """Call the hosts whose end is not known and that are not being asked."""
        asked = {host for host, _ in self._asked.values()}
        now = time.monotonic()
        for host, actor in enumerate(self._actors):
            if self._known[host] is None and host not in asked:
                self._asked[actor.end.remote()] = (host, now)


def lost(reason: object) -> Ended:
    """Return the end of a program on a host that was lost."""
    return Ended(LOST, (f"{ERROR}the host was lost: {first_line(reason)}",))


def first_line(error: object) -> str:
    """Return the first line of an error of Ray."""
    return str(error).partition("\n")[0]


def _end_of(call: Any) -> Ended | None:
    try:
        return ray.get(call)
    except RayError as error:
        return lost(error)
