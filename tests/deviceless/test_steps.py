"""What the real compilers of TPUs and of an H200 say of the steps: in place, nothing large beside, no copies.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
from collections.abc import Iterator
from itertools import product

import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.batch import download_layout
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.inspection import inspect
from jaxserve.engine.lowering import Lowering
from jaxserve.engine.memory import bytes_per_device
from jaxserve.models.decoder import param_specs
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec
from sharding import absent
from sharding.mesh import MeshSpec
from sharding.params import map_specs

# Two layers with the sizes of Llama-3-8B.
SPEC = ModelSpec("llama", 128256, 4096, 2, 32, 8, 128, 14336, 1e-5, 8192, Rope(500000.0))
# Sizes that no weight has by chance: 1.5 * 2^10 tokens, a prime number of pages, and pools too large for any VMEM.
ROWS, TOKENS, CACHE = 64, 1536, 64 * 4099
OPTIONS = EngineOptions(max_batch=ROWS, step_tokens=TOKENS, page_size=64, cache_tokens=CACHE)
DECODE = Bucket("decode", ROWS, ROWS)
STEPS = [DECODE, Bucket("decode", ROWS, ROWS, steps=8), Bucket("prefill", ROWS, TOKENS), Bucket("score", ROWS, TOKENS)]
CHIPS = [("v4", 2), ("v5e", 2), ("v5p", 1), ("v6e", 1), ("7x", 2), ("h200", 1), ("h200", 2)]
COMPILERS = {"tpu": "libtpu", "gpu": "jax_cuda13_plugin"}


def lowering(chip: str, tensor: int) -> Lowering:
    compiler = COMPILERS[absent.CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = MeshSpec(tensor=tensor).build(absent.devices(chip, tensor))
    params = map_specs(lambda param: param.abstract(mesh), param_specs(SPEC, jnp.dtype(jnp.bfloat16)))
    return Lowering(SPEC, params, resolve(OPTIONS, max_positions=8192, lanes=1, affordable_tokens=CACHE), mesh)


def temporaries_bound(bucket: Bucket) -> int:
    """Six arrays of logits (the sampler's and its noise), four of the widest activations, and 64 MiB."""
    logits = ROWS * SPEC.vocab_size * 4
    return 6 * logits + 4 * bucket.tokens * 2 * SPEC.d_mlp * 4 + 2**26


def cases() -> Iterator[ParameterSet]:
    for (chip, tensor), bucket in product(CHIPS, STEPS):
        marks = [] if bucket == DECODE else [pytest.mark.slow]
        yield pytest.param(chip, tensor, bucket, marks=marks, id=f"{chip}x{tensor}-{bucket}")


def copies_weights(chip: str, bucket: Bucket) -> bool:
    """On a 7x weights arrive in tiles of 8 rows, the compiler wants 16 in a loop, and nothing here can ask for those.

    LIBTPU_INIT_ARGS=--xla_tpu_impure_enable_large_2nd_minor_layout=false makes it content with 8.
    """
    return chip == "7x" and (bucket.steps > 1 or bucket.kind == "score")


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "tensor", "bucket"), list(cases()))
def test_in_place_and_without_copies(chip: str, tensor: int, bucket: Bucket) -> None:
    steps = lowering(chip, tensor)
    found = inspect(steps.step(bucket).compile(), steps)
    assert found.aliased >= bytes_per_device(steps.state)  # a TPU pads to tiles
    assert found.fresh <= download_layout(bucket).size * 4 + 2**16
    assert bool(found.copies) == copies_weights(chip, bucket), found.copies
    if not found.copies:
        assert found.temporaries < temporaries_bound(bucket)
    exchanges = {"all-reduce": 2 * SPEC.num_layers + 1, "all-gather": 2 if bucket.kind == "score" else 1}
    assert found.collectives == (exchanges if tensor > 1 else {})  # two per layer, the embedding; the logits
