"""Steps of models with experts, as real compilers build them for meshes that they fit.

Each model has three layers here. Run by `make deviceless`, in an environment that has these
compilers; skipped in any other.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve import plan
from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.lowering import Lowering
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.hlo.inspection import inspect
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import map_specs
from tests.deviceless.attention_step import COMPILERS

# Sizes that no weight has by chance.
LAYERS = 3
ROWS = 24
TOKENS = 352
CACHE = 64 * 1031
OPTIONS = EngineOptions(max_batch=ROWS, step_tokens=TOKENS, page_size=64, cache_tokens=CACHE)
DECODE = Bucket("decode", ROWS, ROWS)
PREFILL = Bucket("prefill", ROWS, TOKENS)
# model, chip, data x expert x tensor
MESHES = [
    ("mixtral-8x7b", "v5e", (1, 8, 2)),
    ("mixtral-8x7b", "v4", (2, 4, 2)),
    ("mixtral-8x7b", "h200", (1, 2, 1)),
    ("qwen3-30b-a3b", "v6e", (1, 1, 4)),
    ("qwen3-30b-a3b", "7x", (1, 2, 1)),
    ("qwen3-30b-a3b", "h200", (1, 1, 1)),
    ("gpt-oss-120b", "v5p", (1, 4, 1)),
    ("gpt-oss-120b", "v6e", (1, 4, 2)),
    ("gpt-oss-120b", "h200", (1, 2, 2)),
    ("deepseek-v3", "v5p", (1, 32, 1)),
    ("deepseek-v3", "7x", (1, 16, 1)),
    ("deepseek-v3", "h200", (1, 8, 1)),
]
QUICK = ("v5e", "h200")


def cases() -> Iterator[ParameterSet]:
    for model, chip, mesh in MESHES:
        for bucket in (DECODE, PREFILL):
            quick = bucket == DECODE and chip in QUICK and model != "gpt-oss-120b"
            name = f"{model}-{chip}-{'x'.join(map(str, mesh))}-{bucket.kind}"
            yield pytest.param(
                model,
                chip,
                MeshSpec(*mesh),
                bucket,
                marks=[] if quick else [pytest.mark.slow],
                id=name,
            )


def shortened_spec(model: str) -> ModelSpec:
    """Cut a published model to its first layers, at most one of them without experts."""
    config = json.loads((Path(plan.__file__).parent / "configs" / f"{model}.json").read_text())
    spec = read_spec(config)[1]
    assert spec.mixture
    mixture = replace(spec.mixture, layers=tuple(range(min(spec.mixture.layers[0], 1), LAYERS)))
    return replace(spec, num_layers=LAYERS, layers=spec.layers[:LAYERS], mixture=mixture)


@pytest.mark.deviceless
@pytest.mark.parametrize(("model", "chip", "axes", "bucket"), list(cases()))
def test_in_place_and_without_copies(model: str, chip: str, axes: MeshSpec, bucket: Bucket) -> None:
    compiler = COMPILERS[CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = axes.build(absent.devices(chip, axes.size))
    spec = shortened_spec(model).on(axes.tensor)
    params = map_specs(
        lambda param: param.abstract(mesh), param_specs(spec, jnp.dtype(jnp.bfloat16))
    )
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
    found = inspect(steps.step(bucket).compile(), steps)
    assert found.aliased >= bytes_per_device(steps.state)
    assert not found.copies
    assert found.temporaries < temporaries_bound(spec, axes, bucket)


def temporaries_bound(spec: ModelSpec, axes: MeshSpec, bucket: Bucket) -> int:
    """Bound the temporaries of a step.

    Six arrays of logits; four of the widest activations; for tokens of all expert shards, twice the
    rows that even routing sends here, three times as wide as the model in float32; and 96 MiB.
    """
    assert spec.mixture
    logits = ROWS * spec.vocab_size * 4
    tokens = bucket.tokens * axes.expert
    rows = 2 * bucket.tokens * spec.mixture.taken + 128 * spec.mixture.experts // axes.expert
    experts = (rows + 2 * tokens) * 3 * spec.d_model * 4
    return 6 * logits + 4 * bucket.tokens * 2 * spec.d_mlp * 4 + experts + 3 * 2**25
