"""Tests of the start-up check of attention: no engine runs a kernel that is wrong on its device."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.engine.device.kernels.attention_check import check_attention
from jaxserve.errors import EngineError
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import Attended, Layout, Options, Pages
from tests.jaxserve.engine.tiny import BASE, WINDOWED, make_engine

FLOAT = jnp.dtype(jnp.float32)
LAYOUT = Layout(2, 64, 16, FLOAT)
OPTIONS = Options(LAYOUT, 0.1)
EIGHT_BITS = replace(OPTIONS, layout=Layout(2, 64, 16, jnp.dtype(jnp.int8)))
Corruption = Callable[[Attended], Attended]


def corrupted_reference(corrupt: Corruption) -> SimpleNamespace:
    """Return the reference implementation with results changed by `corrupt`."""

    def attend(*operands: Any, **more: Any) -> Attended:
        return corrupt(reference.attend(*operands, **more))

    names = ("check", "axes", "allocate", "read", "write_back")
    return SimpleNamespace(attend=attend, **{name: getattr(reference, name) for name in names})


def run_check(
    monkeypatch: pytest.MonkeyPatch, corrupt: Corruption, options: Options = OPTIONS
) -> None:
    known = {"reference": reference, "other": corrupted_reference(corrupt)}
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", known)
    check_attention(
        "other", [replace(options, max_row_tokens=1), options], 4, FLOAT, jax.devices()[0]
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OPTIONS, marks=pytest.mark.slow),
        replace(OPTIONS, window=5, softcap=2.0),
        pytest.param(replace(OPTIONS, layout=Layout(1, 64, 16, FLOAT, 32)), marks=pytest.mark.slow),
        pytest.param(EIGHT_BITS, marks=pytest.mark.slow),
        replace(OPTIONS, layout=Layout(2, 64, 16, jnp.dtype(jnp.float8_e4m3fn))),
        replace(OPTIONS, layout=Layout(1, 64, 16, jnp.dtype(jnp.int8), 32)),
    ],
    ids=["plain", "window", "latent", "int8", "fp8", "latent int8"],
)
def test_the_reference_is_the_reference(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    run_check(monkeypatch, lambda done: done, options)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda done: done._replace(out=done.out.at[-1, 0, 0].add(0.01)),
        lambda done: done._replace(out=done.out.at[0, 0, 0].set(jnp.nan)),
        lambda done: done._replace(
            pages=done.pages._replace(v=done.pages.v.at[0, 1].multiply(1.01))
        ),
        lambda done: done._replace(pages=done.pages._replace(k=done.pages.k.at[0, 1].set(jnp.nan))),
    ],
    ids=["a number", "NaN", "a page", "NaN in a page"],
)
def test_what_differs_is_an_error(monkeypatch: pytest.MonkeyPatch, corrupt: Corruption) -> None:
    with pytest.raises(
        EngineError,
        match=r"attention 'other' in a decode step differs .* on cpu.*--attention refer",
    ):
        run_check(monkeypatch, corrupt)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pages: pages._replace(v=pages.v.at[0, 0].add(1)),
        lambda pages: pages._replace(k_scale=pages.k_scale[:, ::-1]),
        lambda pages: pages._replace(v_scale=pages.v_scale.at[-1].multiply(1.1)),
    ],
    ids=["a number", "scales of other heads", "a page's scales"],
)
def test_so_is_what_differs_in_pages_of_8_bits(
    monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[Pages], Pages]
) -> None:
    with pytest.raises(EngineError, match=r"in a decode step differs"):
        run_check(monkeypatch, lambda done: done._replace(pages=corrupt(done.pages)), EIGHT_BITS)


def test_prompts_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="in a step of prompts"):
        run_check(
            monkeypatch,
            lambda done: done if len(done.out) == 4 else done._replace(out=done.out + 1),
        )


def test_an_engine_does_not_become_ready_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs before any step is compiled."""
    known = {
        "reference": reference,
        "other": corrupted_reference(lambda done: done._replace(out=-done.out)),
    }
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", known)
    _, runner = make_engine(replace(BASE, attention="other"), spec=WINDOWED)
    said: list[str] = []
    with pytest.raises(EngineError, match="differs from the reference"):
        runner.warm_up(runner.buckets.buckets, lambda done, total, what: said.append(what))
    assert said == ["attention against its reference"]


@pytest.fixture
def interpreted_kernels() -> Iterator[None]:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@pytest.mark.slow  # its interpreter takes long, and the kernel has tests of its own
@pytest.mark.kernels
@pytest.mark.usefixtures("interpreted_kernels")
def test_the_hopper_kernel_agrees() -> None:
    dtype = jnp.dtype(jnp.bfloat16)
    steps = [
        Options(Layout(2, 64, 64, dtype), 0.1, max_row_tokens=limit, device_kind="cpu")
        for limit in (1, None)
    ]
    check_attention("gpu", steps, 4, dtype, jax.devices()[0])
