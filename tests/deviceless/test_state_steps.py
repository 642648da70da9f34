"""Steps of a model with recurrent states, as the compilers for TPUs and an H200 build them.

Four layers of Qwen3.5-27B, three of which have a state. Rows of one token are a kernel's, in steps
of prompts too, where another one advances the others.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.lowering import Lowering
from jaxserve.engine.device.memory import bytes_per_device, state_sizes
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.plan.hlo.inspection import find_copies, inspect
from jaxserve.plan.hlo.parser import parse
from jaxserve.plan.model_config import read_config
from jaxserve.sharding import aot_devices
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import map_specs
from tests.deviceless.attention_step import COMPILERS
from tests.deviceless.pallas_calls import pallas_calls
from tests.deviceless.test_steps import copies_weights, launched

LAYERS = 4
ROWS = 16
CACHE = 64 * 4099
OPTIONS = EngineOptions(max_batch=ROWS, step_tokens=512, page_size=64, cache_tokens=CACHE)
DECODE = Bucket("decode", ROWS, ROWS)
STEPS = [DECODE, Bucket("decode", ROWS, ROWS, steps=8), Bucket("prefill", ROWS, 512)]
MESHES = [
    ("v4", 4),
    ("v5e", 2),
    ("v5e", 4),
    ("v6e", 1),
    ("v5p", 1),
    ("7x", 1),
    ("h200", 1),
    ("h200", 2),
]
QUICK = {("v5e", 2), ("h200", 1)}


def lowering(chip: str, tensor: int, options: EngineOptions = OPTIONS) -> Lowering:
    compiler = COMPILERS[CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = MeshSpec(tensor=tensor).build(aot_devices.devices(chip, tensor))
    spec = read_spec(read_config("qwen3.5-27b")[1])[1]
    spec = replace(spec, num_layers=LAYERS, layers=spec.layers[:LAYERS]).on(tensor)
    params = map_specs(
        lambda param: param.abstract(mesh), param_specs(spec, jnp.dtype(jnp.bfloat16))
    )
    config = resolve(
        options,
        max_positions=8192,
        lanes=1,
        affordable_tokens=CACHE,
        states=state_sizes(spec),
        weights="bfloat16",
    )
    return Lowering(spec, params, config, mesh)


def cases() -> Iterator[ParameterSet]:
    for chip, tensor in MESHES:
        for bucket in STEPS:
            quick = (chip, tensor) in QUICK and bucket == DECODE
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(chip, tensor, bucket, marks=marks, id=f"{chip}x{tensor}-{bucket}")


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "tensor", "bucket"), list(cases()))
def test_states_are_updated_in_place(chip: str, tensor: int, bucket: Bucket) -> None:
    steps = lowering(chip, tensor)
    compiled = steps.step(bucket).compile()
    found = inspect(compiled, steps)
    assert found.aliased >= bytes_per_device(steps.state)
    assert bool(found.copies) == copies_weights(chip, bucket), found.copies
    spec = steps.spec
    logits = 6 * ROWS * spec.vocab_size * 4
    activations = 4 * bucket.tokens * 2 * spec.d_mlp * 4
    module = parse(compiled.as_text() or "")
    # No instruction makes an array of the size of a layer's pool, or of its rows' states.
    layer = steps.state.kept[spec.state_layers[0]]
    pools = [x.size // tensor for x in jax.tree.leaves(layer)]
    states = ROWS * max(pools) // layer.memory.shape[1]
    assert not find_copies(module, set(), {*pools, states})
    calls = pallas_calls(module)
    assert calls["gated_delta"] == len(spec.state_layers)
    has_prompts = bucket.kind == "prefill"
    assert calls["gated_delta_prefill"] == (len(spec.state_layers) if has_prompts else 0)
    if not found.copies:
        assert found.temporaries < logits + activations + 2**27


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize(
    "bucket",
    [DECODE, Bucket("prefill", ROWS, 512), Bucket("verify", ROWS, 4 * ROWS, drafts=3)],
    ids=str,
)
def test_a_gpu_gets_a_step_as_one_graph(bucket: Bucket, tmp_path: Path) -> None:
    """Kernels that advance states over a number of blocks that the device knows are part of it."""
    drafts = {"speculate": "ngram", "draft_tokens": bucket.drafts} if bucket.drafts else {}
    step = lowering("h200", 1, replace(OPTIONS, **drafts)).step(bucket)
    step.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
    assert launched(tmp_path) == ["kCommandBuffer"]
