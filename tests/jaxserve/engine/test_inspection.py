"""What the compiler's account of a step is read for: copies are found, and what is none is not called one."""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.inspection import Inspection, inspect
from jaxserve.engine.memory import bytes_per_device
from sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import BASE, make_engine

WEIGHT, PAGES = (640, 512), (1031, 2, 16, 64)  # more than a mebibyte each


def inspected(step: Callable) -> Inspection:
    """Of step(weight, pages, x), the pages donated."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weight, pages, x = (jax.ShapeDtypeStruct(s, np.float32, sharding=one) for s in (WEIGHT, PAGES, (3, WEIGHT[0])))
    compiled = jax.jit(step, donate_argnums=1).lower(weight, pages, x).compile()
    lowering = SimpleNamespace(params={"w": weight}, state=SimpleNamespace(pages=pages))
    return inspect(compiled, lowering)  # type: ignore[arg-type]


def test_a_product_and_a_write_in_place_are_no_copies() -> None:
    found = inspected(lambda w, pages, x: (x @ w, pages.at[7].set(x[0, 0])))
    assert found.copies == () and found.aliased == 4 * np.prod(PAGES) and found.fresh < 2**16


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda w, pages, x: (jnp.sort(w.T, axis=0), pages), id="a weight turned over"),
        pytest.param(lambda w, pages, x: (x, jnp.where(x[0, 0] > 0, pages, 1.0)[::-1]), id="pages selected"),
        pytest.param(lambda w, pages, x: (jnp.sort(pages.swapaxes(1, 2), axis=0), pages), id="pages turned over"),
    ],
)
def test_copies_are_found(step: Callable) -> None:
    assert inspected(step).copies


def test_a_step_of_an_engine() -> None:
    engine, runner = make_engine(BASE, MeshSpec(tensor=2))
    found = inspect(runner.lowering.step(Bucket("decode", 4, 4)).compile(), runner.lowering)
    engine.close()
    assert found.aliased == bytes_per_device(runner.lowering.state)
    assert found.copies == () and found.kernels > 0
    assert found.collectives["all-reduce"] >= 2 * runner.spec.num_layers
