"""Engines whose kernels an interpreter of Pallas runs on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import jax
import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.lowering import Lowering


@contextmanager
def interpreting(
    monkeypatch: pytest.MonkeyPatch, mode: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Interpret kernels in this block, in steps too, which other threads lower.

    Args:
        mode: Function that makes the context of an interpreter, which holds for one thread.
    """
    lower = Lowering.step

    def step(self: Lowering, bucket: Bucket) -> jax.stages.Lowered:
        with mode():
            return lower(self, bucket)

    monkeypatch.setattr(Lowering, "step", step)
    with mode():
        yield
