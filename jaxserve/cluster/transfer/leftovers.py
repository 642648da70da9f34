"""Work that nobody can end goes on without whoever wanted it, and keeps its room."""

import asyncio
from typing import Any

from jaxserve.cluster.transfer.byte_budget import Budget


class Leftovers:
    """stuck: how many should have ended by now."""

    def __init__(self, budget: Budget):
        self.stuck = 0
        self._budget = budget
        self._followed: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._followed)

    def add(self, work: "asyncio.Task[Any]", nbytes: int, deadline: float) -> None:
        """nbytes: that it has room for. deadline: when it should have ended."""
        self._budget.keep(nbytes)
        following = asyncio.create_task(self._follow(work, nbytes, deadline))
        self._followed.add(following)
        following.add_done_callback(self._followed.discard)

    async def _follow(self, work: "asyncio.Task[Any]", nbytes: int, deadline: float) -> None:
        _, late = await asyncio.wait((work,), timeout=max(deadline - asyncio.get_running_loop().time(), 0))
        self.stuck += len(late)
        await asyncio.wait((work,))
        self.stuck -= len(late)
        self._budget.give(nbytes)
        work.exception()  # of no interest to anybody
