"""Checks that the compiled steps can take a plan."""

from jaxserve.engine.plan import StepPlan
from jaxserve.errors import EngineError


def check_plan(plan: StepPlan) -> None:
    """Raise EngineError for what the compiled steps of the plan's kind cannot take."""
    if plan.kind == "decode":
        _check_decodes(plan)
    else:
        _check_chunks(plan)


def _check_decodes(plan: StepPlan) -> None:
    """Raise EngineError for what the compiled decode steps cannot take."""
    for lane in plan.lanes:
        if lane.sizes != lane.samples or max(lane.sizes, default=1) > plan.steps:
            raise EngineError(
                f"a decode step of {plan.steps} was given rows of {lane.sizes} that sample "
                f"{lane.samples}; it takes at most {plan.steps} decodes per row and samples in each"
            )


def _check_chunks(plan: StepPlan) -> None:
    """Raise EngineError for what the compiled steps of other kinds cannot take."""
    samples = [samples for lane in plan.lanes for samples in lane.samples]
    if plan.kind != "verify" and max(samples, default=0) > 1:
        raise EngineError(
            f"a {plan.kind} step samples one token per row; drafted tokens are verified by "
            "verify steps"
        )
    for lane in plan.lanes:
        if lane.sizes != sorted(lane.sizes, key=lambda size: size != 1):
            raise EngineError("chunks of one token have to come first in a plan")
