"""Tests of the start-up check of matmul kernels."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.kernels.matmul_check import check_grouped_matmul, check_quantized_matmul
from jaxserve.errors import EngineError
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.grouped_matmul import api as grouped
from jaxserve.pallas_kernels.grouped_matmul import reference as grouped_reference
from jaxserve.pallas_kernels.grouped_matmul import tpu as grouped_tpu
from jaxserve.pallas_kernels.quantized_matmul import api as quantized
from jaxserve.pallas_kernels.quantized_matmul import reference, tpu
from jaxserve.sharding import params as declared
from tests.jaxserve.engine.tiny import BASE, EXPERTS, make_engine

BF16 = jnp.dtype(jnp.bfloat16)
INT8 = jnp.dtype(jnp.int8)
WEIGHT = quantized.Demand(256, (2, 128), 32, BF16)
OPTIONS = grouped.Options(16, BF16)
EXPERT = grouped.Demand(0, 4, 2, 64, 48, BF16, "")
Corruption = Callable[[jax.Array], jax.Array]
WRONG: list[Corruption] = [
    lambda found: found.at[0, -1, -1].add(3 * jnp.abs(found[:1]).max()),
    lambda found: found * jnp.asarray(1.2, found.dtype),
    lambda found: found.at[0, 0, 0].set(jnp.nan),
    lambda found: jnp.roll(found, 1, axis=-1),
]


@pytest.fixture(autouse=True)
def interpreted_kernels() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode():
        yield


def corrupted_kernel(kernel: Any, corrupt: Corruption) -> Any:
    """Return the kernel with results changed by `corrupt`."""

    def multiply(*operands: Any, **more: Any) -> jax.Array:
        return corrupt(kernel.multiply(*operands, **more))

    others = {
        name: staticmethod(getattr(kernel, name))
        for name in ("check", "block_rows")
        if hasattr(kernel, name)
    }
    return type("Corrupted", (), others | {"multiply": staticmethod(multiply)})


@pytest.mark.parametrize(
    "demand", [WEIGHT, WEIGHT._replace(columns=(640,), contracted=128, group=128)]
)
def test_the_kernel_of_quantized_products(demand: quantized.Demand) -> None:
    check_quantized_matmul([(tpu, demand), (reference, demand)], jax.devices()[0])


@pytest.mark.parametrize(
    "quantize", [{}, {"numbers": INT8, "scales": 1}, {"numbers": INT8, "scales": 2}]
)
def test_the_kernel_of_grouped_products(quantize: dict[str, Any]) -> None:
    demand = EXPERT._replace(contracted=128, columns=128, **quantize)
    for kernel in (grouped_tpu, grouped_reference):
        check_grouped_matmul(kernel, [(OPTIONS, demand)], jax.devices()[0])


@pytest.mark.parametrize("corrupt", WRONG, ids=["a number", "all", "not a number", "columns"])
def test_differences_are_found(corrupt: Corruption) -> None:
    with pytest.raises(
        EngineError,
        match=r"a product of .* numbers .* start with --quantized-matmul reference, and",
    ):
        check_quantized_matmul([(corrupted_kernel(reference, corrupt), WEIGHT)], jax.devices()[0])
    with pytest.raises(
        EngineError, match=r"a product of .* numbers .* start with --grouped-matmul reference, and"
    ):
        check_grouped_matmul(
            corrupted_kernel(grouped_reference, corrupt), [(OPTIONS, EXPERT)], jax.devices()[0]
        )


def test_padding_is_not_compared() -> None:
    def nothing_in_padding(*operands: Any, **more: Any) -> jax.Array:
        return jnp.nan_to_num(grouped_reference.multiply(*operands, **more))

    kernel = SimpleNamespace(multiply=nothing_in_padding)
    check_grouped_matmul(kernel, [(OPTIONS, EXPERT)], jax.devices()[0])


def test_an_engine_with_such_a_kernel_does_not_become_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    monkeypatch.setattr(declared, "REORDERED", {"cpu"})
    monkeypatch.setattr(
        dispatch,
        "GROUPED",
        dict(dispatch.GROUPED) | {"other": corrupted_kernel(grouped_reference, WRONG[1])},
    )
    engine, runner = make_engine(replace(BASE, grouped_matmul="other"), spec=EXPERTS)
    with pytest.raises(EngineError, match="--grouped-matmul reference"):
        runner.warm_up([Bucket("decode", 1, 1)])
    engine.close()
