"""Tests of the bytes that steps send, against counts by hand."""

from dataclasses import replace

import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.plan.hlo.collectives import bytes_sent, group_size
from jaxserve.plan.hlo.inspection import inspect
from jaxserve.plan.hlo.parser import parse
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import BASE, SPEC, make_engine

# A gather of 4 numbers from each of 4 devices in a loop of 5 turns, whose condition has the number
# of turns; a reduction in a loop of 3 turns, whose number the compiler notes; at the end, an
# asynchronous gather and a scatter inside a fusion.
MODULE = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %s = f32[] add(%a, %a)
}

%fused (p: f32[16]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%sum, metadata={op_name="calls=%sum"}
}

%turn (t: (s32[], f32[16])) -> (s32[], f32[16]) {
  %t = (s32[], f32[16]{0}) parameter(0)
  %ag = f32[16]{0} all-gather(%t), replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, dimensions={0}
  ROOT %r = (s32[], f32[16]{0}) tuple(%t, %ag)
}

%more (t: (s32[], f32[16])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  %t = (s32[], f32[16]{0}) parameter(0)
  ROOT %lt = pred[] compare(%t, %five), direction=LT
}

%reduce (t: (s32[], bf16[16])) -> (s32[], bf16[16]) {
  %t = (s32[], bf16[16]{0}) parameter(0)
  %ar = bf16[16]{0} all-reduce(%t), replica_groups=[2,4]<=[8], to_apply=%sum
  ROOT %r = (s32[], bf16[16]{0}) tuple(%t, %ar)
}

%unknown (t: (s32[], bf16[16])) -> pred[] {
  %t = (s32[], bf16[16]{0}) parameter(0)
  ROOT %lt = pred[] compare(%t, %t), direction=LT
}

ENTRY %main (w: f32[16]) -> f32[4] {
  %w = f32[16]{0} parameter(0)
  %loop = (s32[], f32[16]{0}) while(%w), condition=%more, body=%turn, metadata={op_name="while"}
  %told = (s32[], bf16[16]{0}) while(%w), condition=%unknown, body=%reduce, x={"known_trip_count":{"n":"3"}}
  %start = (f32[4]{0:T(8,128)}, f32[16]{0:T(8,128)}) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %turned = f32[4]{0} collective-permute(%w), source_target_pairs={{0,1},{1,0}}
  ROOT %f = f32[4]{0} fusion(%done), kind=kCustom, calls=%fused
}
"""


def test_loops_fusions_and_started_exchanges() -> None:
    assert bytes_sent(parse(MODULE), devices=8) == {
        "all-gather": 6 * 64 * 3 // 4,
        "all-reduce": 3 * 2 * 32 * 3 // 4,
        "reduce-scatter": 16 * 3,
        "collective-permute": 16,
    }


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}", 4),
        ("replica_groups=mesh['a'=2,'b'=8] {'a','b':(1)4}", 8),
        ("replica_groups={}", 8),
    ],
)
def test_groups(groups: str, size: int) -> None:
    module = parse(
        f"ENTRY %m (p: f32[4]) -> f32[4] {{\n  %r = f32[4] all-reduce(%p), {groups}, "
        f"to_apply=%s\n}}\n"
    )
    assert group_size(module["m"]["r"], 8) == size


@pytest.mark.parametrize(
    ("bucket", "turns"), [(Bucket("decode", 4, 4), 1), (Bucket("decode", 4, 4, steps=3), 3)]
)
def test_a_step_of_an_engine(bucket: Bucket, turns: int) -> None:
    """Two devices sum the embedding and two hidden states a layer, and gather half of the logits.

    Sums are of [R, D] float32, logits [R, V].
    """
    spec = replace(SPEC, num_kv_heads=4)
    engine, runner = make_engine(replace(BASE, decode_steps=3), MeshSpec(tensor=2), spec)
    found = inspect(runner.lowering.step(bucket).compile(), runner.lowering)
    engine.close()
    reduced = (2 * spec.num_layers + 1) * 4 * spec.d_model * 4
    gathered = 4 * spec.vocab_size * 4 // 2
    assert found.sent == {"all-reduce": turns * reduced, "all-gather": turns * gathered}
