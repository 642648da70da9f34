"""Engines with the interpreted kernels for int4 in groups, against the loop without cache.

The loop has the dequantized weights in float32. Scales differ from group to group, so that a shard
taken for another is noticed. On two devices `o` and `down` are split along the dimension that they
sum over; the GPU's interpreter has memory for one device.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from jaxserve.config import resolve
from jaxserve.engine.device.kernels.choice import choose_quantized_matmul
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.models.decoder import param_specs
from jaxserve.models.quant import (
    SCHEMES,
    Quantized,
    contracted,
    is_quantized,
    quantized_specs,
)
from jaxserve.pallas_kernels import dispatch
from jaxserve.sharding import params as declared
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import map_specs
from tests.jaxserve.engine import naive
from tests.jaxserve.engine.interpreters import interpreting
from tests.jaxserve.engine.test_engine_oracle import check, requests_for_interpreters
from tests.jaxserve.engine.tiny import BASE, SPEC, run
from tests.pallas_kernels.hopper_kernels import on_gpu
from tests.pallas_kernels.registers import multiply_from_registers
from tests.random_weights import random_weights

# Logits reach 12, and gaps between the best two are about one. The model is twice as wide as SPEC,
# and so is the bound.
BOUND = 0.3
WIDE = replace(SPEC, d_model=64, head_dim=64, d_mlp=256)
FORM = SCHEMES["int4-g32"]


@pytest.fixture
def interpreted_tpu_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret the TPU kernel on a CPU, with weights in a TPU's memory order."""
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    monkeypatch.setattr(declared, "REORDERED", {"cpu"})
    with interpreting(
        monkeypatch, partial(pltpu.force_tpu_interpret_mode, pltpu.InterpretParams())
    ):
        yield


@pytest.fixture
def gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the GPU kernel, or interpret it on a CPU, with weights side by side as on a GPU."""
    if on_gpu():
        yield
        return
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    monkeypatch.setattr(declared, "SUMMED_LAST", {"cpu"})
    multiply_from_registers(monkeypatch)
    with interpreting(
        monkeypatch, partial(plgpu.force_gpu_interpret_mode, plgpu.InterpretGPUParams())
    ):
        yield


def quantized_params(mesh: Mesh) -> dict:
    louder = map_specs(
        lambda param: replace(param, std=0.25), param_specs(WIDE, jnp.dtype(jnp.bfloat16))
    )
    found = random_weights(quantized_specs(WIDE, louder, FORM), mesh, seed=1)
    rng = np.random.default_rng(2)

    def vary_scales(leaf: jax.Array | Quantized) -> jax.Array | Quantized:
        if not isinstance(leaf, Quantized):
            return leaf
        scales = np.asarray(leaf.scales) * rng.uniform(0.5, 1.5, leaf.scales.shape).astype(
            np.float32
        )
        return replace(leaf, scales=jax.device_put(scales, leaf.scales.format))

    return jax.tree.map(vary_scales, found, is_leaf=is_quantized)


def dequantized(params: dict) -> dict:
    """Dequantize the weights into float32, in numpy."""
    specs = param_specs(WIDE, jnp.dtype(jnp.bfloat16), FORM)

    def dequantize(path: tuple, leaf: jax.Array | Quantized, spec: object) -> np.ndarray:
        if not isinstance(leaf, Quantized):
            return np.asarray(leaf, np.float32)
        assert isinstance(spec, Quantized)
        at = contracted(path[-1].key, spec.values.axes)
        numbers = np.asarray(leaf.values, np.float32)
        scales = np.asarray(leaf.scales)
        apart = numbers.reshape(
            *numbers.shape[: at.start], scales.shape[at.start], -1, *numbers.shape[at.stop :]
        )
        return (apart * np.expand_dims(scales, at.start + 1)).reshape(numbers.shape)

    return jax.tree_util.tree_map_with_path(
        dequantize,
        params,
        specs,
        is_leaf=lambda leaf: is_quantized(leaf) or isinstance(leaf, declared.ParamSpec),
    )


@pytest.mark.kernels
@pytest.mark.parametrize(
    "mesh_spec", [pytest.param(MeshSpec(), marks=pytest.mark.slow), MeshSpec(tensor=2)], ids=str
)
@pytest.mark.usefixtures("interpreted_tpu_kernel")
def test_tokens_and_logits_of_the_tpu_kernel(mesh_spec: MeshSpec) -> None:
    check_tokens_and_logits("tpu", mesh_spec)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.usefixtures("gpu_kernel")
def test_tokens_and_logits_of_the_gpu_kernel() -> None:
    check_tokens_and_logits("gpu", MeshSpec())


def check_tokens_and_logits(kernel: str, mesh_spec: MeshSpec) -> None:
    mesh = mesh_spec.build(jax.devices())
    dtype = jnp.dtype(jnp.bfloat16)
    params = quantized_params(mesh)
    options = replace(BASE, quantized_matmul=kernel)
    config = resolve(
        options, max_positions=96, lanes=1, affordable_tokens=10**6, weights=str(dtype)
    )
    assert set(choose_quantized_matmul(WIDE, config, mesh, dtype, FORM)) == {
        "qkv",
        "o",
        "gate_up",
        "down",
    }
    runner = DeviceRunner(WIDE, params, config, mesh)
    engine = Engine(Scheduler(config, fingerprint="tiny"), runner)
    buckets = runner.buckets.buckets
    runner.warm_up(
        [max(b for b in buckets if b.kind == kind) for kind in ("decode", "prefill", "score")]
    )
    arrivals = requests_for_interpreters()
    outcomes = run(engine, arrivals)
    weights = dequantized(quantized_params(MeshSpec().build(jax.devices())))
    for _, request in arrivals:
        p = request.params
        for i in range(p.n):
            answer = naive.generate(weights, WIDE, request, p.seed or 0, i, p.max_tokens or 0)
            check(outcomes[request.id, i], answer, request, i, BOUND)
    engine.close()
