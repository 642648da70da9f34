"""How many decode steps are launched as one."""

from collections.abc import Sequence as Seq

from jaxserve.config import EngineConfig
from jaxserve.engine.host.lane import Lane


class MultiStep:
    """Decides when several decode steps are launched as one, and learns how long that takes."""

    def __init__(self, config: EngineConfig, lanes: Seq[Lane]):
        self._together = config.decode_steps
        # Rows of a lane for which such launches are compiled.
        self.compiled_rows = config.max_batch
        self._lanes = lanes
        # When the last plan was made, if it launched several decodes as one, and how long such a
        # launch took the last time that two of them followed each other.
        self._planned_at: float | None = None
        self._seconds = 0.0

    def decodes(self, waiting: bool, now: float) -> int:
        """Return how many decode steps to launch as one.

        Several only if nothing could change before the launch ends: every row streams, no sequence
        is waiting that could get a row, all pages are there, and no deadline lies inside, as far as
        the time between the last two such launches tells. A request that arrives meanwhile waits
        for less than the length of one launch.

        Args:
            waiting: Whether sequences wait for a row.
        """
        together = self._together
        if together == 1:
            return 1
        if any(len(lane.running) > self.compiled_rows for lane in self._lanes):
            return 1
        if any(lane.blocked or (waiting and lane.has_row) for lane in self._lanes):
            return 1
        running = [seq for lane in self._lanes for seq in lane.running]
        longest = max((seq.limit - seq.num_tokens for seq in running if seq.streaming), default=0)
        if longest < together or any(seq.wants_single_steps for seq in running):
            return 1
        # Another launch is in flight: this one ends after the time of two.
        ends_at = now + 2 * self._seconds
        deadlines = [seq.request.deadline for seq in running]
        if any(deadline is not None and deadline < ends_at for deadline in deadlines):
            return 1
        if not all(lane.has_page_for_everyone(together) for lane in self._lanes):
            return 1
        return together

    def note(self, steps: int, now: float) -> None:
        """Note that a launch of this many decode steps was planned."""
        if steps == 1:
            self._planned_at = None
            return
        if self._planned_at is not None:
            self._seconds = now - self._planned_at
        self._planned_at = now
