"""Timelines of an engine's steps, compared with the plans of the same steps."""

import json
from typing import Any

from jaxserve.engine.trace import DEVICES, GROUPS, HOST, ROWS, StepTrace
from tests.jaxserve.engine.host.driver import PROMPT, Driver, config_of, request


class Clock:
    """A clock that goes on by a millisecond whenever it is read."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        self.time += 0.001
        return self.time


def traced(driver: Driver) -> list[dict[str, Any]]:
    """Run what the driver has, and return the events of the timeline."""
    runner = driver.engine.runner
    with StepTrace(driver.engine, Clock()) as trace:
        driver.run()
    assert driver.engine.runner is runner
    return json.loads(trace.to_json())["traceEvents"]


def of(events: list[dict[str, Any]], group: int, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in events if event["pid"] == group and event["ph"] == phase]


def test_steps_and_their_chunks() -> None:
    driver = Driver(config_of(max_batch=4))
    driver.submit(request("a", prompt=PROMPT[:6], max_tokens=5))
    driver.submit(request("b", prompt=PROMPT[:3], max_tokens=3, n=2))
    events = traced(driver)
    steps = of(events, DEVICES)
    assert [step["name"] for step in steps] == [plan.kind for plan in driver.plans]
    assert [step["args"]["tokens"] for step in steps] == [
        sum(sum(lane.sizes) for lane in plan.lanes) for plan in driver.plans
    ]
    chunks = of(events, ROWS)
    planned = [
        (start, size)
        for plan in driver.plans
        for lane in plan.lanes
        for start, size in zip(lane.starts, lane.sizes, strict=True)
    ]
    assert [(c["args"]["position"], c["args"]["tokens"]) for c in chunks] == planned
    assert {"a: prompt 0 to 6", "b.1: decode"} <= {chunk["name"] for chunk in chunks}
    assert len(of(events, HOST)) == 2 * len(driver.plans)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == set(GROUPS.values())


def test_slices_of_a_track_do_not_overlap() -> None:
    driver = Driver(config_of(max_batch=2))
    for name in "abc":
        driver.submit(request(name, prompt=PROMPT[:4], max_tokens=6))
    events = traced(driver)
    for group in (HOST, DEVICES, ROWS):
        for track in {event["tid"] for event in of(events, group)}:
            slices = sorted(
                (e["ts"], e["ts"] + e["dur"]) for e in of(events, group) if e["tid"] == track
            )
            ends = [end for _, end in slices]
            assert all(b >= a - 1e-6 for a, (b, _) in zip(ends, slices[1:], strict=False))
    waiting = [e["args"]["waiting"] for e in of(events, HOST, "C") if e["name"] == "waiting"]
    assert max(waiting) == 1 and waiting[-1] == 0


def test_prefix_hits_and_preemptions() -> None:
    driver = Driver(config_of(page_size=2, num_pages=8, max_context=16))
    driver.submit(request("a", prompt=PROMPT[:4], max_tokens=8))
    driver.submit(request("b", prompt=PROMPT[4:8], max_tokens=8))
    marks = [event["name"] for event in of(traced(driver), ROWS, "i")]
    assert marks[:2] == ["a enters", "b enters"]
    assert marks.index("b is preempted") < marks.index("b enters again")
    driver.submit(request("like a", prompt=PROMPT[:4], max_tokens=2))
    (entry,) = of(traced(driver), ROWS, "i")
    cached = driver.plans[-1].admissions or driver.plans[-2].admissions
    assert entry["args"] == {"cached tokens": cached[0].length, "prompt tokens": 4}


def test_preemptions_before_the_trace_are_not_of_it() -> None:
    driver = Driver(config_of(page_size=2, num_pages=8, max_context=16))
    driver.submit(request("a", prompt=PROMPT[:4], max_tokens=8))
    driver.submit(request("b", prompt=PROMPT[4:8], max_tokens=8))
    while not any(seq.times.preemptions for seq in driver.scheduler.waiting):
        driver.step()
    marks = [event["name"] for event in of(traced(driver), ROWS, "i")]
    assert marks == ["b enters again"]


def test_a_trace_may_begin_and_end_between_two_steps() -> None:
    driver = Driver(config_of())
    driver.submit(request("a", prompt=PROMPT[:4], max_tokens=9))
    driver.step()
    with StepTrace(driver.engine, Clock()) as trace:
        driver.step()
        driver.step()
    driver.run()
    assert len(of(json.loads(trace.to_json())["traceEvents"], DEVICES)) == 2
