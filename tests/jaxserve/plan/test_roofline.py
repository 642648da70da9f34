"""Bytes and FLOP of a step, against counts by hand."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxserve.models.layer_kind import ConvState, DeltaState, LayerKind, windowed
from jaxserve.models.mixture import Mixture
from jaxserve.models.quant import SCHEMES
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.roofline import Case, Weight, Work, _of_weight, work_of, work_of_attention
from jaxserve.plan.topology import Limits
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import ParamSpec

BF16 = jnp.dtype("bfloat16")
# D 32, L 3, N 4, K 2, H 8, F 48, V 100.
SPEC = ModelSpec("llama", 100, 32, 3, 4, 2, 8, 48, 1e-5, 4096)
ATTENTION = 32 * 2 * 4 * 8 + 4 * 8 * 32  # qkv, o
LAYER = ATTENTION + 32 * 2 * 48 + 48 * 32
NORMS = (2 * 3 + 1) * 32


def test_a_decode_step() -> None:
    """Two rows that see 11 positions each: weights, two rows of the embedding, 22 positions of K
    and V in 3 layers.
    """
    work = work_of(SPEC, BF16, Case("decode", 2, 10, 2))
    assert work.bytes == 2 * (3 * LAYER + NORMS + 32 * 100 + 2 * 32 + 22 * 3 * 2 * 2 * 8)
    assert work.flops == 2 * 2 * (3 * LAYER + 32 * 100) + 22 * 3 * 4 * 4 * 8


def test_pages_of_8_bits() -> None:
    """22 positions in 3 layers: K and V of 2 heads have 8 bytes and a scale of 4, instead of 16
    bytes.
    """
    case = Case("decode", 2, 10, 2)
    whole = work_of(SPEC, BF16, case)
    less = work_of(SPEC, BF16, case, pages=jnp.dtype("int8"))
    assert whole.bytes - less.bytes == 22 * 3 * 2 * 2 * (16 - 12)
    assert whole.flops == less.flops


def test_a_prompt() -> None:
    """Five tokens see 1 + ... + 5 positions; the head reads the last of them, in a score step
    all."""
    work, score = (work_of(SPEC, BF16, Case(kind, 1, 0, 5)) for kind in ("prefill", "score"))
    assert work.bytes == 2 * (3 * LAYER + NORMS + 32 * 100 + 5 * 32 + 5 * 3 * 2 * 2 * 8)
    assert work.flops == 2 * (5 * 3 * LAYER + 32 * 100) + 15 * 3 * 4 * 4 * 8
    assert score.bytes == work.bytes and score.flops == work.flops + 4 * 2 * 32 * 100


def test_quantized_weights() -> None:
    """A byte for each number of the layers, and four for a scale: of every output channel, or of
    every 32 numbers.
    """
    case = Case("decode", 1, 0, 1)
    whole, int8, int4 = (
        work_of(SPEC, BF16, case, scheme=scheme)
        for scheme in (None, SCHEMES["int8"], SCHEMES["int4"])
    )
    channels = 2 * 4 * 8 + 32 + 2 * 48 + 32
    assert int8.flops == whole.flops and int8.bytes == whole.bytes - 3 * (LAYER - 4 * channels)
    assert int4.bytes == int8.bytes - 3 * LAYER / 2
    wide = replace(SPEC, d_mlp=64)
    groups = 3 * (ATTENTION + 3 * 32 * 64) // 32
    whole, grouped = (
        work_of(wide, BF16, case, scheme=scheme) for scheme in (None, SCHEMES["int4-g32"])
    )
    assert grouped.bytes == whole.bytes - 1.5 * 32 * groups + 4 * groups


def test_quantized_experts() -> None:
    """One token hits 2 of 8 experts: a byte for each number, and 4 for each channel's scale.

    The router and the shared gate keep their two bytes; the shared MLP is read whole.
    """
    mixture = Mixture(
        experts=8, taken=2, d_expert=64, layers=(0, 1, 2), d_shared=32, shared_gate=True
    )
    spec = replace(SPEC, mixture=mixture)
    case = Case("decode", 1, 0, 1)
    whole, int8, int4 = (
        work_of(spec, BF16, case, scheme=SCHEMES[name] if name else None)
        for name in ("", "int8", "int4")
    )
    numbers = ATTENTION + 2 * 3 * 32 * 64 + 3 * 32 * 32
    channels = 2 * 4 * 8 + 32 + 2 * (2 * 64 + 32) + 2 * 32 + 32
    assert int8.flops == whole.flops
    assert int8.bytes == pytest.approx(whole.bytes - 3 * (numbers - 4 * channels))
    assert int4.bytes == pytest.approx(int8.bytes - 3 * numbers / 2)
    groups = work_of(spec, BF16, case, scheme=SCHEMES["int4-g32"])
    assert groups.bytes == pytest.approx(int4.bytes + 3 * 4 * (numbers / 32 - channels))
    shared = work_of(spec, BF16, case, MeshSpec(expert=4, tensor=2), SCHEMES["int8"])
    same = work_of(spec, BF16, case, MeshSpec(expert=4, tensor=2))
    hit = (1 - 0.75**4) * 2  # of its two experts, by four lanes' tokens
    of_experts = hit * 3 * 32 * 64 / 2
    rest = (ATTENTION + 3 * 32 * 32) / 2
    sums = (
        hit * (2 * 64 / 2 + 32) + (2 * 4 * 8 / 2 + 32) + (2 * 32 / 2 + 32)
    )  # `down` and `o` scale whole sums
    assert same.bytes - shared.bytes == pytest.approx(3 * (of_experts + rest - 4 * sums))


def test_products_of_8_bits() -> None:
    """Products with quantized weights are faster; attention and the head are not."""
    case = Case("prefill", 1, 0, 500)
    limits = Limits(bandwidth=1e9, flops=1e9, int8=2e9, fp8=4e9)
    whole, alone, both, other = (
        work_of(SPEC, BF16, case, scheme=scheme and SCHEMES[scheme])
        for scheme in (None, "int8", "w8a8-int8", "w8a8-fp8")
    )
    narrow = 2 * 500 * 3 * LAYER
    assert (
        both == alone._replace(int8=narrow)
        and other == alone._replace(fp8=narrow)
        and alone.int8 == 0
    )
    assert whole.floor(limits) == alone.floor(limits) == pytest.approx(whole.flops / 1e9)
    assert both.floor(limits) == pytest.approx((whole.flops - narrow / 2) / 1e9)
    assert other.floor(limits) == pytest.approx((whole.flops - narrow * 3 / 4) / 1e9)
    head = work_of(SPEC, BF16, case, scheme=replace(SCHEMES["w8a8-int8"], head=True))
    assert head.int8 == narrow + 2 * 32 * 100


def test_a_tied_head_is_read_once() -> None:
    tied, apart = (
        work_of(replace(SPEC, tied_head=head), BF16, Case("decode", 1, 0, 1))
        for head in (True, False)
    )
    assert tied.flops == apart.flops and tied.bytes == apart.bytes - 2 * 32


@pytest.mark.parametrize(
    ("context", "tokens", "seen", "live"),
    [(2, 1, 3, 3), (20, 1, 4, 4), (0, 6, 18, 6), (20, 3, 12, 6)],
)
def test_a_window(context: int, tokens: int, seen: int, live: int) -> None:
    """A window of four positions includes the token's own."""
    seeing_four = replace(SPEC, layers=windowed([4, 4, 4]))
    work = work_of(seeing_four, BF16, Case("prefill", 1, context, tokens))
    without = work_of(replace(SPEC, num_layers=3), BF16, Case("prefill", 1, 0, tokens))
    own = sum(range(1, tokens + 1))
    assert work.bytes - without.bytes == (live - tokens) * 3 * 2 * 2 * 8 * 2
    assert work.flops - without.flops == (seen - own) * 3 * 4 * 4 * 8


def test_states_are_read_and_written_once() -> None:
    """Two layers with 4 heads of 8 x 8 numbers, and the inputs of 3 tokens: 2 x (16 + 16) each."""
    state = DeltaState(key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=4)
    kinds = (LayerKind(state=state), LayerKind(), LayerKind(state=state))
    one = work_of_attention(replace(SPEC, layers=kinds), BF16, Case("decode", 3, 10, 3))
    attention = work_of_attention(replace(SPEC, num_layers=1), BF16, Case("decode", 3, 10, 3))
    slot = 2 * (4 * 8 * 8 + 3 * 2 * (16 + 16)) * 4
    assert one.bytes - attention.bytes == 3 * 2 * slot
    assert one.flops - attention.flops == 3 * 7 * 2 * 4 * 8 * 8


def test_short_convolutions_read_and_write_their_inputs() -> None:
    """Two layers with 2 heads of 16 numbers keep those of 2 tokens, and multiply three."""
    state = ConvState(heads=2, channels=16, taps=3)
    kinds = (LayerKind(state=state), LayerKind(), LayerKind(state=state))
    one = work_of_attention(replace(SPEC, layers=kinds), BF16, Case("decode", 3, 10, 3))
    attention = work_of_attention(replace(SPEC, num_layers=1), BF16, Case("decode", 3, 10, 3))
    assert one.bytes - attention.bytes == 3 * 2 * 2 * (2 * 32 * 4)
    assert one.flops - attention.flops == 3 * 2 * 2 * 3 * 32


def test_tensor_parallelism_shares_everything_but_norms() -> None:
    case = Case("decode", 4, 100, 4)
    whole = work_of(SPEC, BF16, case)
    half = work_of(SPEC, BF16, case, MeshSpec(tensor=2))
    assert half.flops == whole.flops / 2
    assert half.bytes == (whole.bytes + 2 * NORMS) / 2


def test_copies_of_kv_heads_are_read_by_every_device() -> None:
    """Two kv heads on four devices: each reads one head's pages, where two devices read as much."""
    four = work_of(SPEC.on(4), BF16, Case("decode", 1, 1000, 1), MeshSpec(tensor=4))
    two = work_of(SPEC, BF16, Case("decode", 1, 1000, 1), MeshSpec(tensor=2))
    weights = [
        work_of(SPEC.on(n), BF16, Case("decode", 1, 0, 1), MeshSpec(tensor=n)).bytes for n in (4, 2)
    ]
    assert four.bytes - weights[0] == two.bytes - weights[1] == 1000 * 3 * 2 * 8 * 2


def test_lanes_repeat_the_work() -> None:
    case = Case("decode", 2, 10, 2)
    assert work_of(SPEC, BF16, case, MeshSpec(data=4)) == work_of(SPEC, BF16, case)


def test_experts_that_are_hit() -> None:
    """One token hits 2 of 8 experts, two tokens 3.5, many all; every token computes 2."""
    spec = SimpleNamespace(mixture=SimpleNamespace(experts=8, taken=2))
    weight = Weight("gate_up", "layers", ParamSpec("EDCF", (8, 32, 2, 48), BF16), "gate_up")
    one = 32 * 2 * 48

    def of(tokens: int, mesh: MeshSpec) -> Work:
        return _of_weight(weight, spec, Case("decode", tokens, 0, tokens), mesh)  # type: ignore[arg-type]

    alone = MeshSpec()
    assert of(1, alone).bytes == pytest.approx(2 * 2 * one)
    assert of(2, alone).bytes == pytest.approx(3.5 * 2 * one)
    assert of(1000, alone).bytes == pytest.approx(8 * 2 * one)
    assert of(3, alone).flops == pytest.approx(2 * 3 * 2 * one)
    shared = MeshSpec(
        expert=4, tensor=2
    )  # 4 lanes of one token each meet at each device's two experts
    assert of(1, shared).bytes == pytest.approx((1 - 0.75**4) * 2 * 2 * one / 2)
    assert of(1, shared).flops == pytest.approx(2 * 4 * 2 * one / 4 / 2)


def test_a_floor_is_the_slower_of_memory_and_products() -> None:
    limits = Limits(bandwidth=100, flops=1000)
    assert limits.ridge == 10
    assert Work(200, 100).floor(limits) == 2 and Work(200, 5000).floor(limits) == 5
