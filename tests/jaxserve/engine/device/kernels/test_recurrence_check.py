"""Tests of the start-up check of the kernel for recurrent states."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jaxserve.engine.device.kernels.recurrence_check import BOUNDS, check_recurrence
from jaxserve.errors import EngineError
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.gated_delta import chunked, gpu, tpu
from jaxserve.pallas_kernels.gated_delta.api import Advanced, DeltaStates, Demand, Options
from jaxserve.pallas_kernels.short_convolution.api import Chunks
from tests.jaxserve.engine.tiny import BASE, STATES, largest_of_each_kind, make_engine
from tests.slow_cases import slow_but

DEMAND = Demand(2, 2, 128, 128, 4)
Corruption = Callable[[Advanced, Chunks], Advanced]


def with_memory(change: Callable[[jax.Array], jax.Array], idle: bool = False) -> Corruption:
    """Return a corruption of states, of every step or of those in which no row runs."""

    def corrupt(done: Advanced, chunks: Chunks) -> Advanced:
        memory = done.states.memory
        changed = jnp.where(idle & chunks.live.any(), memory, change(memory))
        return done._replace(states=done.states._replace(memory=changed))

    return corrupt


WRONG: dict[str, tuple[Corruption, str]] = {
    "an answer": (
        lambda done, _: done._replace(out=done.out.at[1, 0, 0, 0].add(0.1)),
        r"in answers of \[7, 2, 2, 128\], differs",
    ),
    "a kept input": (
        lambda done, _: done._replace(
            states=DeltaStates(done.states.inputs.at[1, 0, 0, 0].add(1), done.states.memory)
        ),
        r"in kept inputs of \[14, 3, 2, 512\], differs",
    ),
    "a state": (with_memory(lambda x: x.at[5, 1, 1, 5, 7].add(0.5)), "in states of"),
    "another slot": (with_memory(lambda x: x.at[12].set(0)), "in states of .* by inf"),
    "not a number": (with_memory(lambda x: x.at[1, 0, 0, 0].set(jnp.nan)), "in states of .*inf"),
    "where no row runs": (
        with_memory(lambda x: x.at[5].add(1), idle=True),
        "in states without rows of",
    ),
    "an answer of an idle row": (
        lambda done, _: done._replace(out=done.out.at[3].add(0.1)),
        "in answers of",
    ),
}


@pytest.fixture(autouse=True)
def interpreted_kernels() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode():
        yield


@pytest.mark.parametrize("dtype", slow_but(list(BOUNDS), [jnp.dtype("bfloat16")]), ids=str)
def test_the_kernel_agrees(dtype: jnp.dtype) -> None:
    for kernel in (tpu, chunked):
        check_recurrence(kernel, [(Options(), DEMAND)], dtype, jax.devices()[0])


@pytest.mark.slow  # its interpreter takes longest, and the kernels have tests of their own
def test_the_hopper_kernels_agree() -> None:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        check_recurrence(gpu, [(Options(), DEMAND)], jnp.dtype("bfloat16"), jax.devices()[0])


@pytest.mark.parametrize("wrong", WRONG)
def test_differences_are_found(wrong: str) -> None:
    corrupt, said = WRONG[wrong]

    def decode(*operands: Any, options: Options) -> Advanced:
        return corrupt(chunked.decode(*operands, options), operands[3])

    kernel: Any = SimpleNamespace(decode=decode, prefill=chunked.prefill)
    with pytest.raises(EngineError, match=rf"{said}.* start with --recurrence reference, and"):
        check_recurrence(kernel, [(Options(), DEMAND)], jnp.dtype("float32"), jax.devices()[0])


@pytest.mark.parametrize(
    ("part", "place", "said"),
    [(0, 9, r"in answers to prompts of \[28, 2, 2, 128\]"), (1, 4, "in states behind them of")],
)
def test_differences_of_prompts_are_found(part: int, place: int, said: str) -> None:
    def prefill(*operands: Any, options: Options) -> tuple[jax.Array, jax.Array]:
        found = list(chunked.prefill(*operands, options))
        found[part] = found[part].at[place, 1].multiply(1.1)
        return found[0], found[1]

    kernel: Any = SimpleNamespace(decode=chunked.decode, prefill=prefill)
    with pytest.raises(EngineError, match=rf"{said}.* start with --recurrence reference, and"):
        check_recurrence(kernel, [(Options(), DEMAND)], jnp.dtype("float32"), jax.devices()[0])


def test_an_engine_with_a_wrong_kernel_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*operands: Any, options: Options) -> Advanced:
        done = chunked.decode(*operands, options)
        return done._replace(out=1.5 * done.out)

    wrong = SimpleNamespace(check=lambda options, demand: None, decode=decode, prefill=tpu.prefill)
    monkeypatch.setattr(dispatch, "RECURRENCES", {**dispatch.RECURRENCES, "tpu": wrong})
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    _, runner = make_engine(replace(BASE, recurrence="tpu"), spec=STATES)
    with pytest.raises(EngineError, match="kernel of recurrent states, in answers of"):
        runner.warm_up(largest_of_each_kind(runner))
