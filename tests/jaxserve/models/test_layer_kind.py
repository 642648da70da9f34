"""Kinds of layers, and the page groups that follow from them."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxserve.errors import ModelError
from jaxserve.models.decoder import param_specs
from jaxserve.models.layer_kind import DeltaState, Latent, LayerKind, PageGroup, windowed
from jaxserve.models.spec import ModelSpec

SPEC = ModelSpec("test", 32, 16, 3, 4, 2, 8, 24, 1e-5, 64)
LATENT = Latent(None, rank=16, head=8, rotated=4, value=8)
STATE = DeltaState(key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=4)


def page_groups(*layers: LayerKind) -> tuple[PageGroup, ...]:
    return replace(SPEC, num_layers=len(layers), layers=layers).page_groups()


def test_layers_of_a_window_are_a_group_and_a_long_window_is_none() -> None:
    assert page_groups(*windowed([7, None, 64, 7])) == (
        PageGroup((0, 3), 7, 2, 8),
        PageGroup((1, 2), None, 2, 8),
    )
    assert SPEC.page_groups() == (PageGroup((0, 1, 2), None, 2, 8),)


def test_layers_that_keep_other_sizes_have_a_group_of_their_own() -> None:
    wide = LayerKind(kv_heads=1, head_dim=16)
    narrow_values = LayerKind(v_dim=4)
    assert page_groups(LayerKind(), wide, narrow_values, wide, LayerKind(v_dim=8)) == (
        PageGroup((0, 4), None, 2, 8),
        PageGroup((1, 3), None, 1, 16),
        PageGroup((2,), None, 2, 8, v_dim=4),
    )


def test_keys_alone_have_no_values_in_their_pages_and_no_shards() -> None:
    (_, alone) = page_groups(LayerKind(), LayerKind(kv_heads=1, head_dim=12, v_dim=0))
    assert alone == PageGroup((1,), None, 1, 12, value_dim=0)
    layout = alone.layout(16, jnp.dtype(jnp.bfloat16), shards=4)
    assert not layout.keeps_values and layout.kv_heads == 1 and layout.out_dim == 0


def test_a_latent_layer_keeps_its_vector_and_the_rotated_part_of_the_key() -> None:
    spec = replace(
        SPEC, num_kv_heads=1, head_dim=12, layers=(LayerKind(latent=LATENT),) * SPEC.num_layers
    )
    assert spec.page_groups() == (PageGroup((0, 1, 2), None, 1, 20, value_dim=16),)
    assert spec.latent == LATENT and spec.rope_dim == 4


def test_layers_that_read_the_entries_of_another_one_have_none() -> None:
    sliding = LayerKind(window=7)
    shared = page_groups(
        LayerKind(), sliding, LayerKind(entries_of=0), LayerKind(window=7, entries_of=1)
    )
    assert shared == (
        PageGroup((0,), None, 2, 8),
        PageGroup((1,), 7, 2, 8),
    )


def test_layers_with_a_state_are_in_no_page_group() -> None:
    kind = LayerKind(state=STATE)
    spec = replace(SPEC, layers=(kind, LayerKind(), kind))
    assert spec.page_groups() == (PageGroup((1,), None, 2, 8),)
    assert (spec.slot_groups, spec.num_groups, spec.state_layers) == (1, 2, (0, 2))
    assert (SPEC.slot_groups, SPEC.num_groups, SPEC.state_layers) == (0, 1, ())
    with pytest.raises(ModelError, match="keeps no tokens"):
        LayerKind(state=STATE, window=7)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"value_heads": 3}, "3 value heads do not divide by 2 key heads"),
        ({"taps": 1}, "taps is 1; it must be at least 2"),
        ({"key_dim": 0}, "key_dim is 0; it must be at least 1"),
    ],
)
def test_sizes_of_a_state_that_cannot_be_are_refused(sizes: dict[str, int], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        replace(STATE, **sizes)


def test_copies_are_made_of_the_model_s_kv_heads() -> None:
    spec = replace(SPEC, num_layers=2, layers=(LayerKind(), LayerKind(kv_heads=4))).on(4)
    assert spec.page_groups() == (
        PageGroup((0,), None, 4, 8, copies=2),
        PageGroup((1,), None, 4, 8),
    )


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        (windowed([7, None]), "2 layers are described; the model has 3"),
        ((LayerKind(entries_of=1), LayerKind(), LayerKind()), "layer 0 reads .* of layer 1"),
        (
            (LayerKind(), LayerKind(entries_of=0), LayerKind(entries_of=1)),
            "layer 2 reads the entries of layer 1, which must be an earlier one that has entries",
        ),
        ((LayerKind(state=STATE), LayerKind(entries_of=0), LayerKind()), "layer 1 reads"),
        ((LayerKind(state=STATE),) * 3, "layers all have a state"),
        (
            (LayerKind(state=STATE), LayerKind(state=replace(STATE, taps=2)), LayerKind()),
            "layers differ in the sizes of their states",
        ),
        ((LayerKind(latent=LATENT),) * 3, "latent attention with 2 kv heads of 8"),
        (
            (LayerKind(latent=LATENT), LayerKind(latent=replace(LATENT, rank=8)), LayerKind()),
            "layers differ in the sizes of latent attention",
        ),
    ],
)
def test_contradictions_are_refused(layers: tuple[LayerKind, ...], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        replace(SPEC, layers=layers)


def test_a_window_of_no_token_is_refused() -> None:
    with pytest.raises(ModelError, match="window is 0; it must be at least 1"):
        windowed([0])


def test_sizes_that_nothing_computes_yet_are_refused() -> None:
    spec = replace(SPEC, num_layers=2, layers=(LayerKind(), LayerKind(kv_heads=1)))
    with pytest.raises(ModelError, match="layer 1 has its own kv_heads"):
        param_specs(spec, jnp.dtype(jnp.float32))
    with pytest.raises(ModelError, match="one width for both"):
        PageGroup((0,), None, 2, 8, v_dim=4).layout(16, jnp.dtype(jnp.float32))
