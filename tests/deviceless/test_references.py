"""Bytes that references move, as the planner counts them and as a compiler has them move."""

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels.gated_delta import chunked
from jaxserve.pallas_kernels.gated_delta.api import Advanced, DeltaStates, Options, Tokens
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.short_convolution.api import Chunks
from jaxserve.plan.hlo.parser import Body, parse
from jaxserve.plan.references import STATE_PASSES, Chunk, References, attention_bytes
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.rules import replicated
from tests.deviceless.attention_step import COMPILERS, Step, compile_for

STEPS = [
    Step(),
    Step(stored="int8", page_size=128),
    Step(heads=128, kv_heads=1, head_dim=576, value_dim=512),
    Step(heads=128, kv_heads=1, head_dim=576, value_dim=512, stored="int8", page_size=128),
]


def walk_of(module: dict[str, Body]) -> Body:
    """Return the loop over blocks: the computation with both products."""
    (found,) = (body for body in module.values() if sum("dot" in name for name in body) > 1)
    return found


@pytest.mark.deviceless
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_attention(step: Step) -> None:
    """Every array of the loop is written and read once; beside that pages are read as stored, and
    scores once more.
    """
    compiled, _ = compile_for(reference, "h200", step)
    body = walk_of(parse(compiled.as_text() or ""))
    made = sum(each.nbytes for each in body.values() if each.makes_arrays)
    layout = step.layout
    block = max(64, step.page_size)
    numbers = step.kv_heads * (layout.head_dim + layout.out_dim)
    stored = block * numbers * layout.bits / 8
    scores = block * step.heads * 4
    moved = 2 * made / step.rows + stored + scores
    references = References(jnp.dtype(step.dtype), step.page_size)
    chunk = Chunk("decode", 10 * block - 1, 1)
    counted = attention_bytes(references, layout, step.heads, chunk, window=None) / 10
    # Masks are not counted, nor partial sums of a product that the compiler splits.
    assert 0.7 * moved < counted < 1.01 * moved


@pytest.mark.deviceless
def test_recurrence() -> None:
    """A decode step reads the states in three fusions, writes a copy, and scatters that."""
    if importlib.util.find_spec(COMPILERS["gpu"]) is None:
        pytest.skip(f"needs {COMPILERS['gpu']} (make deviceless)")
    rows, k, r, d, v, slots = 32, 16, 3, 128, 128, 64
    mesh = MeshSpec().build(absent.devices("h200", 1))

    def array(*shape: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))

    inputs = 2 * d + r * v
    tokens = Tokens(array(rows, k, inputs, dtype="bfloat16"), array(rows, k, r), array(rows, k, r))
    taps = array(4, k, inputs, dtype="bfloat16")
    states = DeltaStates(array(slots, 3, k, inputs), array(slots, k, r, d, v))
    numbers = array(rows, dtype="int32")
    live = array(rows, dtype="bool")
    chunks = Chunks(numbers, numbers, numbers, live, numbers, numbers)

    def advance(tokens: Tokens, taps: Any, states: DeltaStates, chunks: Chunks) -> Advanced:
        return chunked.advance(tokens, taps, states, chunks, 1, chunked, Options())

    step = jax.jit(advance, donate_argnums=2).lower(tokens, taps, states, chunks)
    text = step.compile().as_text() or ""
    body = next(each for name, each in parse(text).items() if name.startswith("main"))
    size = rows * math.prod((k, r, d, v))
    (memory,) = (
        each.name
        for each in body.values()
        if each.op == "parameter" and each.sizes == [slots * size // rows]
    )
    readers = [each for each in body.values() if memory in each.operands and each.makes_arrays]
    copies = [each for each in body.values() if each.makes_arrays and size in each.sizes]
    assert len(copies) == 1
    scattered = [each for each in readers if copies[0].name in each.operands]
    assert len(scattered) == 1
    passes = len(readers) - len(scattered) + 2 * len(copies) + len(scattered)
    assert passes == 2 * STATE_PASSES
