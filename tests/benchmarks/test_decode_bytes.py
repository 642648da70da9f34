"""Bytes of a decode step: arrays of a compiled step, and what kernels copy, counted by hand."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.decode_bytes import CHIPS, CONTEXTS, bytes_made, copied_by_attention
from jaxserve.pallas_kernels.paged_attention.api import Layout, Options
from jaxserve.plan.hlo.parser import parse
from jaxserve.sharding.chips import CHIPS as KNOWN

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "decode_bytes.json"
# A fusion of 8 KB; a product of 4 KB beside a workspace; a weight that a TPU reads ahead; an array
# in its core's memory; pages, which are written in place.
STEP = """
ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %a = (bf16[2048]{0}, f32[1024]{0}) fusion(%x), kind=kLoop, calls=%fused
  %b = (f32[1024]{0}, s8[4194304]{0}) custom-call(%x), custom_call_target="product"
  %c = (f32[512]{0:T(128)S(1)}, f32[512]{0:T(128)}, u32[]{:S(2)}) copy-start(%x)
  %d = f32[512]{0:T(128)S(1)} fusion(%x), kind=kLoop, calls=%fused
  ROOT %e = f32[4096]{0} fusion(%x), kind=kInput, calls=%fused
}
"""
LAYOUT = Layout(8, 128, 64, jnp.dtype(jnp.bfloat16))


def test_arrays_that_a_step_makes() -> None:
    assert bytes_made(parse(STEP), pages={4096}) == 2 * 2048 + 4 * 1024 + 4 * 1024


@pytest.mark.parametrize("chip", CHIPS)
def test_pages_are_copied_once(chip: str) -> None:
    """Beside them there are queries, and the tiles around new tokens."""
    options = Options(LAYOUT, 1.0, max_row_tokens=1, device_kind=KNOWN[chip].kind)
    lengths = [512, 1024]
    pages = sum(lengths) * LAYOUT.token_bytes
    assert pages < copied_by_attention(chip, options, 32, lengths) < 1.07 * pages


def test_results_are_sums() -> None:
    found = json.loads(RESULTS.read_text())
    assert [(row["chip"], row["context"]) for row in found] == [
        (chip, context) for chip in CHIPS for context in CONTEXTS
    ]
    for row in found:
        moved = row["weights"] + row["attention"] + row["arrays"]
        assert row["over_floor"] == moved / row["floor"] > 1
