"""Tests of compiled steps: the state is updated in place, and nothing large stands beside it."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineOptions
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.token_layout import TokenLayout
from jaxserve.engine.plan import LanePlan, StepPlan
from jaxserve.errors import EngineError
from jaxserve.models.layer_kind import windowed
from jaxserve.models.spec import ModelSpec
from tests.jaxserve.engine.tiny import BASE, EXPERTS, SPEC, STATES, make_engine
from tests.slow_cases import slow_but

LARGE = EngineOptions(max_batch=4, page_size=16, step_tokens=32, cache_tokens=2**18)
BUCKETS = [
    Bucket("decode", 1, 1),
    Bucket("decode", 4, 4),
    Bucket("decode", 4, 4, steps=8),
    Bucket("prefill", 4, 32),
    Bucket("score", 4, 32),
]
ALONE = [Bucket("prefill", 1, 32), Bucket("score", 1, 32)]  # of an engine with one row


def nbytes(tree: object) -> int:
    """Return the bytes of all arrays of a pytree, over all devices."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def runner():
    engine, runner = make_engine(LARGE)
    yield runner
    engine.close()


@pytest.mark.parametrize("bucket", [*BUCKETS, *ALONE], ids=str)
def test_state_is_aliased_and_never_copied(runner, bucket: Bucket) -> None:
    """Temporaries stay under a tenth of one layer's pages, which have 34 MB."""
    memory = runner.lowering.step(bucket).compile().memory_analysis()
    state = runner.lowering.state
    assert memory.alias_size_in_bytes == nbytes(state)
    assert memory.temp_size_in_bytes < nbytes(state.kept[0]) / 10


SLOT_BUCKETS = [*BUCKETS[1:], Bucket("verify", 4, 16, drafts=3)]


@pytest.mark.parametrize("bucket", slow_but(SLOT_BUCKETS, SLOT_BUCKETS[1::3]), ids=str)
def test_slots_are_aliased_and_never_copied(bucket: Bucket) -> None:
    """Temporaries stay under a tenth of one layer's states, which have about 4 MB."""
    options = replace(LARGE, cache_tokens=2**16, snapshot_share=0.9, speculate="ngram")
    engine, runner = make_engine(options, spec=STATES)
    memory = runner.lowering.step(bucket).compile().memory_analysis()
    state = runner.lowering.state
    assert memory.alias_size_in_bytes == nbytes(state)
    assert memory.temp_size_in_bytes < nbytes(state.kept[0]) / 10
    engine.close()


@pytest.mark.parametrize(
    "spec, kinds",
    [
        (replace(SPEC, num_layers=6), 1),
        (replace(SPEC, num_layers=6, layers=windowed([7, None] * 3)), 2),
        (replace(EXPERTS, num_layers=6), 2),
    ],
    ids=["alike", "windows", "experts in two layers"],
)
def test_layers_that_are_alike_are_lowered_once(spec: ModelSpec, kinds: int) -> None:
    """Lowering the kernels of one layer can take a second."""
    engine, runner = make_engine(BASE, spec=spec)
    lowered = runner.lowering.step(Bucket("prefill", 4, 32)).as_text()
    assert len(re.findall(r"func.func private @decoder_layer\w*\(", lowered)) == kinds
    assert len(re.findall(r"call @decoder_layer\w*\(", lowered)) == 6
    engine.close()


def test_writers_alias_the_state_too(runner) -> None:
    runner.warm_up([])
    for name, writer in runner.executables.writers.items():
        memory = writer.memory_analysis()
        assert memory.alias_size_in_bytes == nbytes(runner.lowering.state), name
        assert memory.temp_size_in_bytes < nbytes(runner.lowering.state.kept[0]) / 10, name


def test_pages_take_what_the_spec_says(runner) -> None:
    config = runner.config
    token = 2 * SPEC.num_kv_heads * SPEC.head_dim * 4
    assert (
        nbytes(runner.lowering.state.kept)
        == config.pools[0].pages * config.page_size * SPEC.num_layers * token
    )


def test_a_compile_is_counted_where_a_request_waits_for_it(runner) -> None:
    runner.warm_up([])
    before = runner.compiles_after_ready
    jax.jit(lambda x: x + 16)(1.0)  # of the program around the engine
    assert runner.compiles_after_ready == before
    with runner.executables.compiles.watching():
        jax.jit(lambda x: x + 17)(1.0)
    assert runner.compiles_after_ready > before


def test_layout_of_a_step_s_tokens() -> None:
    """The step has two decodes, a chunk of three tokens at the end of five, and padding."""
    begin = jnp.array([[7, 4, 2, 4]])
    sizes = jnp.array([[1, 1, 3, 0]])
    layout = TokenLayout.of_chunks(begin, sizes, tokens=8)
    assert layout.split.tolist() == [[2, 3]]
    assert layout.lengths.tolist() == [[8, 5, 5, 0]] and layout.starts.tolist() == [[0, 1, 2, 5, 5]]
    assert layout.position.tolist() == [[7, 4, 2, 3, 4, 0, 0, 0]]
    assert layout.live.tolist() == [[True] * 5 + [False] * 3]


def test_a_plan_out_of_order_is_refused(runner) -> None:
    lane = LanePlan(
        sequences=[1, 2],
        rows=[0, 1],
        starts=[0, 4],
        sizes=[3, 1],
        samples=[1, 1],
        tokens=[5, 6, 7, -1],
    )
    with pytest.raises(EngineError, match="chunks of one token have to come first"):
        runner.launch(StepPlan(1, "prefill", (lane,), ()))
