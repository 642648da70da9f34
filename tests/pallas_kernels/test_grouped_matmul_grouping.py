"""Every assignment has a row of its own, in a block of its expert, in order.

Fewer blocks would not do for all assignments.
"""

from itertools import product

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels.grouped_matmul.grouping import CHUNK, arrange, blocks_needed


@st.composite
def assignments(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw ids, experts and block.

    Sizes are few and many, around the borders of chunks and blocks; some ids are out of range.
    """
    experts = draw(st.sampled_from([1, 2, 5, 16]))
    block = draw(st.sampled_from([1, 8, 16]))
    size = draw(st.sampled_from([1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]))
    ids = st.integers(-2, experts + 2) if draw(st.booleans()) else st.sampled_from([0, experts - 1])
    return draw(st.lists(ids, min_size=size, max_size=size)), experts, block


arrange_compiled = jax.jit(arrange, static_argnums=(1, 2))


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(assignments())
def test_rows_are_sorted_by_expert_in_blocks_of_their_own(case: tuple[list[int], int, int]) -> None:
    ids, experts, block = case
    groups, position = jax.tree.map(
        np.asarray, arrange_compiled(np.array(ids, np.int32), experts, block)
    )
    rows = blocks_needed(len(ids), experts, block) * block
    assert (
        len(groups.experts) == rows // block and position.dtype == groups.experts.dtype == np.int32
    )
    expected = np.full(len(ids), rows)
    owners = []
    for expert in range(experts):
        mine = [nth for nth, found in enumerate(ids) if found == expert]
        expected[mine] = len(owners) * block + np.arange(len(mine))
        owners += [expert] * -(-len(mine) // block)
    np.testing.assert_array_equal(position, expected)
    assert groups.live == len(owners)
    np.testing.assert_array_equal(groups.experts[: len(owners)], owners)
    assert ((groups.experts >= 0) & (groups.experts < experts)).all()


@pytest.mark.parametrize(("experts", "block"), list(product([1, 2, 3], [1, 2, 3, 4])))
def test_no_fewer_blocks_would_do(experts: int, block: int) -> None:
    """Compare with the most blocks that any counts of assignments take, having tried all."""
    for size in range(12):
        counts = (c for c in product(range(size + 1), repeat=experts) if sum(c) <= size)
        most = max(sum(-(-count // block) for count in c) for c in counts)
        assert blocks_needed(size, experts, block) == most


def test_thousands_of_assignments() -> None:
    """Arrange as many assignments as a step of prompts has."""
    ids = np.random.default_rng(0).zipf(1.3, 16384).astype(np.int32) % 140
    groups, position = jax.tree.map(np.asarray, arrange_compiled(ids, 128, 128))
    ours = ids < 128
    assert (position[~ours] == len(groups.experts) * 128).all()
    np.testing.assert_array_equal(groups.experts[position[ours] // 128], ids[ours])
    assert len(set(position[ours])) == ours.sum() and position[ours].max() < groups.live * 128
    order = np.argsort(position[ours])
    assert (np.diff(ids[ours][order]) >= 0).all() and (
        np.diff(order)[np.diff(ids[ours][order]) == 0] > 0
    ).all()
