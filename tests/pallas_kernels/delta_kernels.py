"""Kernels of the gated delta rule as tests run them, and the slots of states that they leave."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.gated_delta import gpu, tpu
from jaxserve.pallas_kernels.gated_delta.api import DeltaStates
from tests.pallas_kernels.hopper_kernels import interpreted_or_run, on_gpu

KERNELS = {"tpu": tpu, "gpu": gpu}
BOUND = 2e-5  # of differences from float64
SLOTS = 12


@contextmanager
def interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret a kernel in this block, and look for races; on a GPU run its own."""
    if name == "gpu":
        with interpreted_or_run(monkeypatch):
            yield
        return
    if on_gpu():
        pytest.skip("its interpreter is for a CPU")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield


def as_numpy(states: DeltaStates) -> list[np.ndarray]:
    return [np.array(x) for x in states]


def unchanged(states: DeltaStates, before: list[np.ndarray], slots: set[int]) -> bool:
    """Return whether these slots have the bits that they had."""
    rest = sorted(slots)
    return all(
        np.array_equal(np.asarray(x)[rest], old[rest], equal_nan=True)
        for x, old in zip(states, before, strict=True)
    )
