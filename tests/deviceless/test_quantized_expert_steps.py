"""Steps with quantized experts, as real compilers build them.

Experts are read in the form in which they are stored. Each model has three layers here.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
from collections.abc import Iterator
from itertools import product

import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.config import resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.lowering import Lowering, abstract_params
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.models.quant import SCHEMES
from jaxserve.plan.hlo.inspection import find_copies, inspect
from jaxserve.plan.hlo.parser import parse
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec
from tests.deviceless.attention_step import COMPILERS
from tests.deviceless.test_expert_steps import (
    CACHE,
    DECODE,
    OPTIONS,
    PREFILL,
    shortened_spec,
    temporaries_bound,
)
from tests.deviceless.test_quantized_steps import shard_sizes, widened_weights

# model, chip, data x expert x tensor
MESHES = [
    ("mixtral-8x7b", "v5e", (1, 8, 2)),
    ("qwen3-30b-a3b", "v6e", (1, 1, 1)),
    ("gpt-oss-120b", "v5p", (1, 4, 1)),
    ("deepseek-v3", "7x", (1, 16, 1)),
]
QUICK = ("mixtral-8x7b", "int8", DECODE)
STEPS = [(name, DECODE) for name, scheme in SCHEMES.items() if not scheme.activations]
STEPS += [("int8", PREFILL), ("int4-g32", PREFILL)]


def cases() -> Iterator[ParameterSet]:
    """Yield all cases but gpt-oss in groups of 128, which do not divide its 2,880 numbers."""
    for (model, chip, mesh), (weights, bucket) in product(MESHES, STEPS):
        marks = [] if (model, weights, bucket) == QUICK else [pytest.mark.slow]
        if (model, weights) != ("gpt-oss-120b", "int4-g128"):
            name = f"{model}-{chip}-{'x'.join(map(str, mesh))}-{weights}-{bucket.kind}"
            yield pytest.param(model, chip, MeshSpec(*mesh), weights, bucket, marks=marks, id=name)


@pytest.mark.deviceless
@pytest.mark.parametrize(("model", "chip", "axes", "weights", "bucket"), list(cases()))
def test_experts_are_read_as_they_are_kept(
    model: str, chip: str, axes: MeshSpec, weights: str, bucket: Bucket
) -> None:
    compiler = COMPILERS[CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = axes.build(absent.devices(chip, axes.size))
    spec = shortened_spec(model).on(axes.tensor)
    params = abstract_params(spec, jnp.dtype(jnp.bfloat16), mesh, SCHEMES[weights])
    windows = [group.window for group in spec.page_groups()]
    config = resolve(
        OPTIONS,
        max_positions=8192,
        lanes=axes.lanes,
        affordable_tokens=CACHE,
        windows=windows,
        weights="bfloat16",
    )
    steps = Lowering(spec, params, config, mesh)
    compiled = steps.step(bucket).compile()
    found = inspect(compiled, steps)
    module = parse(compiled.as_text() or "")
    experts = shard_sizes([layer.get("experts", {}) for layer in params["layers"]])
    assert found.aliased >= bytes_per_device(steps.state)
    assert not find_copies(module, experts, set())
    assert not list(widened_weights(module, experts))
    assert found.temporaries < temporaries_bound(spec, axes, bucket)
    logical = bytes_per_device(params) + bytes_per_device(steps.state)
    assert found.arguments == pytest.approx(logical, rel=0.03)
