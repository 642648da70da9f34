"""The leader's runner."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from jaxserve.cluster.compatibility import Facts, compiled_stage, facts_of_steps
from jaxserve.cluster.encoding import compile_message, plan_to_bytes
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.background import Around, OnEnd
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner, Launched
from jaxserve.engine.plan import StepOutput, StepPlan


class Orders(Protocol):
    """Sender of orders to the followers; see jaxserve.cluster.leader.Leader."""

    def order(self, **kind: Any) -> None: ...

    def agree(self, stage: str, facts: Callable[[], Facts]) -> None: ...

    def stated_by_now(self, stage: str) -> Sequence[Facts] | None: ...

    def on_facts(self, call: Callable[[], None]) -> None: ...

    def expect_steps(self) -> None: ...

    def delaying_failure(self) -> AbstractContextManager[None]: ...


class LeadingRunner(DeviceRunner):
    """The leader's runner: it sends its followers an order before it compiles or launches."""

    def __init__(self, leader: Orders, *args: Any):
        super().__init__(*args)
        self._leader = leader

    def warm_up(
        self, buckets: Iterable[Bucket], progress: Progress = lambda done, total, what: None
    ) -> None:
        """Compile these steps on every host, unless all of them are compiled already."""
        buckets = tuple(buckets)
        if self.executables.has(buckets):
            return
        self._leader.order(compile=compile_message(buckets))
        super().warm_up(buckets, progress)
        self._leader.agree("compiled", partial(facts_of_steps, buckets))
        self._leader.expect_steps()

    def compile_in_background(
        self,
        buckets: Iterable[Bucket],
        on_end: OnEnd | None = None,
        around: Around | None = None,
    ) -> None:
        """Compile those of these steps that are not compiled, on every host, and return at once.

        `on_end` is called whenever a host has compiled a step, or could not, and the others may not
        have yet.
        """
        missing = self.missing(buckets)
        if not missing:
            return
        self._leader.order(compile_beside=compile_message(missing))
        if on_end:
            # Which bucket it is makes no difference: `install` looks at all of them.
            self._leader.on_facts(partial(on_end, missing[0], True))
        super().compile_in_background(missing, on_end, around)

    def install(self) -> tuple[Bucket, ...]:
        """Put the steps into use that every host has compiled, on every host."""
        self._take_compiled()
        everywhere = []
        for bucket in list(self._coming):
            stated = self._leader.stated_by_now(compiled_stage(bucket))
            if stated is None:
                continue
            if any(stated):  # a host could not: larger steps go on in its place
                del self._coming[bucket]
            else:
                everywhere.append(bucket)
        if everywhere:
            self._leader.order(install=compile_message(everywhere))
        with self._leader.delaying_failure():
            return self.install_all(everywhere)

    def launch(self, plan: StepPlan) -> Launched:
        self._leader.order(plan=plan_to_bytes(plan))
        with self._leader.delaying_failure():
            return super().launch(plan)

    def collect(self, plan: StepPlan, handle: Launched) -> StepOutput:
        with self._leader.delaying_failure():
            return super().collect(plan, handle)
