"""Bytes that attention and recurrent states move without a kernel, counted by hand."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.engine.plan import StepKind
from jaxserve.models.layer_kind import DeltaState, LayerKind
from jaxserve.pallas_kernels.paged_attention.api import Layout
from jaxserve.plan.references import Chunk, References, attention_bytes
from jaxserve.plan.roofline import Case, work_of_attention
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.plan.test_roofline import BF16, SPEC

BY_REFERENCE = References(BF16, 64)
# K 2, H 8: keys and values of a position have 32 numbers.
LAYOUT = Layout(2, 8, 64, BF16)
SCORE = 3 * 4 + 2 * 2


def moved(chunk: Chunk, heads: int = 4, window: int | None = None, **changed: Any) -> float:
    layout = replace(LAYOUT, **changed)
    references = BY_REFERENCE._replace(page_size=layout.page_size)
    return attention_bytes(references, layout, heads, chunk, window)


def test_a_decode_step_walks_whole_blocks() -> None:
    """Positions up to 64 lie in two blocks; sums of 4 heads x 8 values pass memory four times."""
    block = 64 * (3 * 32 * 2 + 4 * SCORE) + 4 * 8 * 16
    assert moved(Chunk("decode", 63, 1)) == block
    assert moved(Chunk("decode", 64, 1)) == 2 * block


def test_pages_of_8_bits_are_copied_as_they_are_stored() -> None:
    """A block is a page where that is longer; a scale of each key and each value is read."""
    block = 128 * (3 * 32 + 2 * 2 * 4 + 4 * SCORE) + 4 * 8 * 16
    found = moved(Chunk("decode", 100, 1), page_size=128, dtype=jnp.dtype("int8"))
    assert found == block


def test_latent_pages_are_copied_twice() -> None:
    """The keys' 24 numbers, and the first 16 of them as values."""
    block = 64 * (3 * (24 + 16) * 2 + 4 * SCORE) + 4 * 16 * 16
    assert moved(Chunk("decode", 0, 1), kv_heads=1, head_dim=24, value_dim=16) == block


def test_every_tile_of_a_prompt_walks_by_itself() -> None:
    """Of 80 tokens three tiles of 32 queries walk over 1, 1 and 2 blocks."""
    block = 64 * (3 * 32 * 2 + 32 * 4 * SCORE) + 32 * 4 * 8 * 16
    assert moved(Chunk("prefill", 0, 80)) == 4 * block


@pytest.mark.parametrize(("context", "blocks"), [(10, 1), (300, 1), (319, 1), (320, 2)])
def test_a_window_skips_blocks(context: int, blocks: int) -> None:
    found = moved(Chunk("decode", context, 1), window=30)
    assert found == blocks * moved(Chunk("decode", 0, 1))


def test_rows_layers_and_shards_multiply() -> None:
    """Three layers of two rows on one of two devices: one kv head and two query heads."""
    case = Case("decode", 2, 10, 2)
    by_kernel, found = (
        work_of_attention(SPEC, BF16, case, MeshSpec(tensor=2), references)
        for references in (None, BY_REFERENCE)
    )
    one = moved(Chunk("decode", 10, 1), heads=2, kv_heads=1)
    assert found.bytes == 3 * 2 * one > 3 * by_kernel.bytes
    assert found.flops == by_kernel.flops


def test_states_pass_memory_three_times() -> None:
    state = LayerKind(state=DeltaState(2, 4, 8, 8, 4))
    spec = replace(SPEC, layers=(state, LayerKind(), state))
    attending = replace(SPEC, num_layers=1)
    times: dict[StepKind, int] = {"decode": 3, "prefill": 1}
    for kind, passes in times.items():
        case = Case(kind, 3, 10, 3)
        attention = work_of_attention(attending, BF16, case).bytes
        by_kernel, found = (
            work_of_attention(spec, BF16, case, references=References(states=states))
            for states in (False, True)
        )
        assert found.bytes - attention == passes * (by_kernel.bytes - attention)
        assert found.flops == by_kernel.flops
