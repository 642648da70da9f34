"""Steps of a Llama, as the compilers for TPUs and an H200 build them.

The state is updated in place, nothing large is allocated beside, and nothing is copied.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.batch import download_layout
from jaxserve.engine.device.lowering import Lowering
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.models.decoder import param_specs
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.hlo.inspection import inspect
from jaxserve.plan.hlo.parser import parse
from jaxserve.sharding import aot_devices
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec, spans_hosts
from jaxserve.sharding.params import map_specs
from tests.deviceless.attention_step import COMPILERS
from tests.deviceless.pallas_calls import pallas_calls

# Two layers with the sizes of Llama-3-8B.
SPEC = ModelSpec("llama", 128256, 4096, 2, 32, 8, 128, 14336, 1e-5, 8192, Rope(500000.0))
# Sizes that no weight has by chance: 1.5 * 2^10 tokens, a prime number of pages, and pools too
# large for any VMEM.
ROWS = 64
TOKENS = 1536
CACHE = 64 * 4099
OPTIONS = EngineOptions(max_batch=ROWS, step_tokens=TOKENS, page_size=64, cache_tokens=CACHE)
DECODE = Bucket("decode", ROWS, ROWS)
STEPS = [
    DECODE,
    Bucket("decode", ROWS, ROWS, steps=8),
    Bucket("prefill", ROWS, TOKENS),
    Bucket("score", ROWS, TOKENS),
]
# Slices up to whole pods, as data x tensor. On 16 chips, two have the same kv head. A device of a
# 7x is a core: 128 devices are 64 chips.
PODS = [
    ("v5e", 1, 4),
    ("v5e", 1, 16),
    ("v5e", 2, 8),
    ("v5e", 8, 8),
    ("v5e", 32, 8),
    ("v5p", 8, 8),
    ("v6e", 32, 8),
    ("7x", 16, 8),
]
QUICK_POD = ("v5e", 2, 8)
MESHES = [("v4", 2), ("v5e", 2), ("v5p", 1), ("v6e", 1), ("7x", 2), ("h200", 1), ("h200", 2)]


def lowering(
    chip: str,
    tensor: int,
    data: int = 1,
    embeds: bool = False,
    spec: ModelSpec = SPEC,
    options: EngineOptions = OPTIONS,
) -> Lowering:
    compiler = COMPILERS[CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = MeshSpec(data=data, tensor=tensor).build(aot_devices.devices(chip, data * tensor))
    spec = replace(spec, embeds=embeds).on(tensor)
    params = map_specs(
        lambda param: param.abstract(mesh), param_specs(spec, jnp.dtype(jnp.bfloat16))
    )
    config = resolve(
        options,
        max_positions=8192,
        lanes=data,
        affordable_tokens=CACHE,
        embeds=embeds,
        weights="bfloat16",
    )
    return Lowering(spec, params, config, mesh)


def temporaries_bound(bucket: Bucket) -> int:
    """Bound the temporaries of a step.

    Six arrays of logits (the sampler's and its noise), four of the widest activations, and 64 MiB.
    """
    logits = ROWS * SPEC.vocab_size * 4
    return 6 * logits + 4 * bucket.tokens * 2 * SPEC.d_mlp * 4 + 2**26


def cases() -> Iterator[ParameterSet]:
    for (chip, tensor), bucket in product(MESHES, STEPS):
        marks = [] if bucket == DECODE else [pytest.mark.slow]
        yield pytest.param(chip, tensor, bucket, marks=marks, id=f"{chip}x{tensor}-{bucket}")


def copies_weights(chip: str, bucket: Bucket) -> bool:
    """Return whether this step is known to copy weights.

    On a 7x weights arrive in tiles of 8 rows, the compiler wants 16 in a loop, and jax cannot ask
    for those. LIBTPU_INIT_ARGS=--xla_tpu_impure_enable_large_2nd_minor_layout=false makes it
    content with 8.
    """
    return chip == "7x" and (bucket.steps > 1 or bucket.kind == "score")


def expected_calls(chip: str, bucket: Bucket) -> dict[str, int]:
    """Return the calls of Pallas kernels that a step has.

    On a GPU rows with one token and rows with more have a call each, and XLA writes pages. On a TPU
    a decode step writes its tokens while it attends.
    """
    if CHIPS[chip].platform == "gpu":
        return {"paged_attention": SPEC.num_layers * (1 if bucket.kind == "decode" else 2)}
    writes = {} if bucket.kind == "decode" else {"page_write": SPEC.num_layers}
    return {"paged_attention": SPEC.num_layers, **writes}


def expected_collectives(
    tensor: int, bucket: Bucket, several_lanes_and_hosts: bool
) -> dict[str, int]:
    """Return the collectives that a step has.

    Two sums per layer and one of the embedding, and a gather of the logits. Lanes exchange nothing,
    but every host gets all results.
    """
    gathers = {"embed": 0, "score": 2}.get(bucket.kind, 1) if tensor > 1 else 0
    sums = 2 * SPEC.num_layers + 1 if tensor > 1 else 0
    exchanges = {"all-reduce": sums, "all-gather": gathers + several_lanes_and_hosts}
    return {name: count for name, count in exchanges.items() if count}


def check_step(chip: str, bucket: Bucket, tensor: int, data: int = 1) -> None:
    steps = lowering(chip, tensor, data, embeds=bucket.kind == "embed")
    compiled = steps.step(bucket).compile()
    found = inspect(compiled, steps)
    assert found.aliased >= bytes_per_device(steps.state)  # a TPU pads to tiles
    gathers = data > 1 and spans_hosts(steps.mesh)
    assert (
        found.unaliased
        <= download_layout(bucket, SPEC.d_model).size * 4 * (data if gathers else 1) + 2**16
    )
    assert bool(found.copies) == copies_weights(chip, bucket), found.copies
    if not found.copies:
        assert found.temporaries < temporaries_bound(bucket)
    assert found.collectives == expected_collectives(tensor, bucket, gathers)
    assert pallas_calls(parse(compiled.as_text() or "")) == expected_calls(chip, bucket)


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "tensor", "bucket"), list(cases()))
def test_in_place_and_without_copies(chip: str, tensor: int, bucket: Bucket) -> None:
    check_step(chip, bucket, tensor)


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize(("chip", "tensor"), [("v5e", 2), ("v6e", 1), ("h200", 1)])
def test_an_embed_step(chip: str, tensor: int) -> None:
    check_step(chip, Bucket("embed", ROWS, TOKENS), tensor)


def pods() -> Iterator[ParameterSet]:
    for pod in PODS:
        marks = [] if pod == QUICK_POD else [pytest.mark.slow]
        yield pytest.param(*pod, marks=marks, id="-".join(map(str, pod)))


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "data", "tensor"), list(pods()))
def test_a_decode_step_of_a_pod(chip: str, data: int, tensor: int) -> None:
    check_step(chip, DECODE, tensor, data)


def launched(folder: Path) -> list[str]:
    """Return the kinds of what the host launches for a program, from the compiler's dump."""
    (plan,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
    return re.findall(r"^\d+: (k\w+)", plan.read_text(), re.MULTILINE)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "bucket",
    [
        DECODE,
        pytest.param(Bucket("prefill", ROWS, TOKENS), marks=pytest.mark.slow),
        pytest.param(Bucket("verify", ROWS, 4 * ROWS, drafts=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_gpu_gets_a_step_as_one_graph(bucket: Bucket, tmp_path: Path) -> None:
    """Otherwise the host would wait for the model's end, to launch the sampler's loops."""
    drafts = {"speculate": "ngram", "draft_tokens": bucket.drafts} if bucket.drafts else {}
    options = replace(OPTIONS, **drafts)
    step = lowering("h200", 1, options=options).step(bucket)
    step.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
    assert launched(tmp_path) == ["kCommandBuffer"]
