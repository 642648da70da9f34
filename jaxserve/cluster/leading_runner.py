"""The leader's runner."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from jaxserve.cluster.compatibility import Facts, facts_of_steps
from jaxserve.cluster.encoding import compile_message, plan_to_bytes
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner, Launched
from jaxserve.engine.plan import StepOutput, StepPlan


class Orders(Protocol):
    """Sender of orders to the followers; see jaxserve.cluster.leader.Leader."""

    def order(self, **kind: Any) -> None: ...

    def agree(self, stage: str, facts: Callable[[], Facts]) -> None: ...

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

    def launch(self, plan: StepPlan) -> Launched:
        self._leader.order(plan=plan_to_bytes(plan))
        with self._leader.delaying_failure():
            return super().launch(plan)

    def collect(self, plan: StepPlan, handle: Launched) -> StepOutput:
        with self._leader.delaying_failure():
            return super().collect(plan, handle)
