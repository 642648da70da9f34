"""Warm-up: steps are lowered ahead on another thread, which no fault leaves behind."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device import executables
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.errors import EngineError
from tests.jaxserve.engine.tiny import BASE, make_engine


@pytest.fixture
def runner() -> Iterator[DeviceRunner]:
    _, runner = make_engine(options=replace(BASE, max_batch=2, step_tokens=16, cache_tokens=128))
    yield runner
    runner.executables.clear()


def test_steps_are_lowered_on_another_thread_each_once(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = runner.lowering.step
    lowered: list[tuple[Bucket, threading.Thread]] = []

    def noted(bucket: Bucket) -> jax.stages.Lowered:
        lowered.append((bucket, threading.current_thread()))
        return lower(bucket)

    monkeypatch.setattr(runner.lowering, "step", noted)
    buckets = runner.buckets.buckets[:2]
    runner.warm_up([*buckets, buckets[0]])
    assert [bucket for bucket, _ in lowered] == list(buckets)
    assert threading.current_thread() not in {thread for _, thread in lowered}
    assert runner.compiled == buckets


def test_a_warm_up_that_is_interrupted_lowers_no_further_step(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = runner.buckets.buckets
    began = threading.Event()
    cancelled = threading.Event()
    lowered: list[Bucket] = []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait)

    def held(bucket: Bucket) -> None:
        lowered.append(bucket)
        began.set()
        assert cancelled.wait(60)

    def interrupt(done: int, total: int, what: str) -> None:
        assert began.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(executables, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(runner.lowering, "step", held)
    with pytest.raises(KeyboardInterrupt):
        runner.warm_up(buckets, interrupt)
    assert lowered == [buckets[0]]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lower")]


def test_a_step_that_cannot_be_lowered_ends_the_warm_up_with_its_error(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = runner.buckets.buckets
    lower = runner.lowering.step

    def refused(bucket: Bucket) -> jax.stages.Lowered:
        if bucket == second:
            raise EngineError("no such step")
        return lower(bucket)

    monkeypatch.setattr(runner.lowering, "step", refused)
    with pytest.raises(EngineError, match="no such step"):
        runner.warm_up([first, second])
    assert runner.compiled == (first,)
