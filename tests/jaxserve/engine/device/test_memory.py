"""The cache's size is planned from the compiler's figures."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine import build
from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.device import memory
from jaxserve.engine.device.draft_model import DraftModel, ModelDrafter
from jaxserve.engine.device.lowering import Footprint, Lowering
from jaxserve.engine.device.memory import (
    MemoryBudget,
    affordable_pages,
    bytes_of_others,
    bytes_per_device,
    cache_bytes,
    device_limit,
    memory_errors,
)
from jaxserve.engine.device.state import abstract_state
from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import BASE, SPEC, make_params

MESH = MeshSpec()


def test_bytes_of_the_cache() -> None:
    """The cache has two layers, K and V, 2 heads of 8 and float32; --tensor 2 halves it."""
    config = resolve(BASE, max_positions=96, lanes=1, affordable_tokens=0)
    assert cache_bytes(SPEC, config, reference, tensor=1) == 1024 * 2 * 2 * 2 * 8 * 4
    assert cache_bytes(SPEC, config, reference, tensor=2) == 1024 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_pages_of_8_bits_carry_scales(kv: str) -> None:
    """Each key and value has a float32 scale."""
    config = resolve(replace(BASE, kv=kv), max_positions=96, lanes=1, affordable_tokens=0)
    assert cache_bytes(SPEC, config, reference, tensor=1) == 1024 * 2 * 2 * 2 * (8 + 4)


@pytest.mark.parametrize(("kv", "head"), [("auto", 4 * 8), ("bfloat16", 2 * 8), ("int8", 8 + 4)])
def test_a_full_device_holds_more_tokens_of_8_bits(kv: str, head: int) -> None:
    """All memory that is left becomes pages. head: bytes of a token's key or value."""
    mesh = MESH.build(jax.devices())
    params = make_params(mesh)
    options = EngineOptions(max_batch=64, step_tokens=64, page_size=16, kv=kv)
    state = abstract_state(SPEC, build.plan_config(SPEC, params, mesh, options), mesh, reference)
    limit = bytes_per_device(params) + bytes_per_device(state.rows) + 2**16
    planned = build.plan_config(
        SPEC, params, mesh, options, limit, lambda lowering, bucket: Footprint(0, 0)
    )
    assert planned.pools[0].pages == 2**16 // (2 * 2 * 2 * head * 16)


def test_a_window_takes_what_its_rows_can_hold() -> None:
    """Rows hold 2 x 4 x (3 + 1) pages, and two steps each take 8 whole pages and 4 begun ones."""
    config = resolve(BASE, max_positions=10**6, lanes=1, affordable_tokens=0, windows=(None, 10))
    assert [(pool.pages, pool.window) for pool in config.pools] == [
        (256, None),
        (2 * 4 * (3 + 1) + 2 * (8 + 4), 10),
    ]
    assert config.policies[0].held(1000) == 250
    assert config.policies[1].held(1000) == 20 == -(-(10 + 2 * 32) // 4) + 1
    assert config.capacity == 1024
    only = resolve(BASE, max_positions=10**6, lanes=1, affordable_tokens=0, windows=(10,))
    assert only.capacity == 10**6, "a model that sees a window only can go on for ever"


def test_bytes_per_device_counts_shards() -> None:
    one = MESH.build(jax.devices())
    two = MeshSpec(tensor=2).build(jax.devices())
    whole, halved = (make_params(mesh)["layers"][0]["qkv"] for mesh in (one, two))
    assert bytes_per_device({"qkv": whole}) == whole.nbytes == 2 * bytes_per_device({"qkv": halved})


def test_affordable_pages() -> None:
    budget = MemoryBudget(limit=1000, weights=500, rows=100, temporaries=30, programs=20)
    assert affordable_pages(budget, cache=lambda pages: 10 * pages, wanted=99) == 35
    assert affordable_pages(budget, cache=lambda pages: 10 * pages, wanted=9) == 9
    assert (
        affordable_pages(budget, cache=lambda pages: 10 * min(pages, 20) + pages, wanted=999) == 150
    )
    with pytest.raises(MemoryLimitError, match="no memory is left for the KV cache") as caught:
        affordable_pages(replace(budget, limit=655), cache=lambda pages: 10 * pages, wanted=99)
    assert caught.value.missing == 5


GIB = 2**30


@pytest.mark.parametrize(
    ("host", "arrays"),
    [
        (64 * GIB, 32 * GIB),
        (GIB * 3 // 2, GIB // 2),  # a container: Python and compiled steps take about 0.8 GiB
        (GIB, GIB // 8),
    ],
)
def test_the_host_lends_a_part_of_its_memory(
    host: int, arrays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: host)
    each = arrays // jax.local_device_count()
    assert device_limit(MESH.build(jax.devices())) == each
    assert device_limit(MeshSpec(tensor=2).build(jax.devices())) == each


def test_arrays_of_others_take_memory_from_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of another engine, or of the program around it, on the same devices."""
    mesh = MESH.build(jax.devices())
    two = MeshSpec(tensor=2).build(jax.devices())
    params = make_params(mesh)
    before = bytes_of_others(mesh, params)
    assert bytes_of_others(mesh, ()) == before + bytes_per_device(params)
    other = jax.device_put(np.zeros(2**20, np.int32), jax.devices()[0])
    elsewhere = jax.device_put(np.zeros(2**21, np.int32), jax.devices()[-1])
    assert bytes_of_others(mesh, params) == bytes_of_others(two, params) == before + other.nbytes
    del elsewhere
    held = bytes_of_others(mesh, params)
    options = EngineOptions(max_batch=64, step_tokens=64, page_size=16)
    wish = build.plan_config(SPEC, params, mesh, options)
    state = abstract_state(SPEC, wish, mesh, reference)
    own = bytes_per_device(params) + bytes_per_device(state.rows)
    limit = own + held + wish.capacity * 256
    monkeypatch.setattr(build, "device_limit", lambda mesh: limit)
    smaller = build.plan_config(
        SPEC, params, mesh, options, footprint=lambda *_: Footprint(temporaries=2**12, program=0)
    )
    assert smaller.capacity * 256 == wish.capacity * 256 - 2**12
    monkeypatch.setattr(build, "device_limit", lambda mesh: own + held)
    with pytest.raises(MemoryLimitError, match="give other engines of this process fewer"):
        build.plan_config(SPEC, params, mesh, options, footprint=lambda *_: Footprint(0, 0))
    del other
    assert bytes_of_others(mesh, params) == before


def test_a_small_device_gets_a_smaller_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, rows, cache and temporaries stay within the limit, and nearly fill it."""
    mesh = MESH.build(jax.devices())
    params = make_params(mesh)
    options = EngineOptions(max_batch=64, step_tokens=64, page_size=16)
    wish = build.plan_config(SPEC, params, mesh, options)
    assert wish.capacity == 64 * 96
    state = abstract_state(SPEC, wish, mesh, reference)
    fixed = bytes_per_device(params) + bytes_per_device(state.rows)
    limit = fixed + wish.capacity * 256  # no room for the temporaries
    monkeypatch.setattr(build, "device_limit", lambda mesh: limit)
    monkeypatch.setattr(build, "bytes_of_others", lambda mesh, own: 0)
    planned = build.plan_config(SPEC, params, mesh, options)
    assert 0 < planned.capacity < wish.capacity
    assert fixed + planned.capacity * 256 < limit


def test_steps_are_asked_about_with_a_cache_that_nearly_fills_the_device() -> None:
    """After the compiler refuses the first step, the others are compiled with one page."""
    mesh = MESH.build(jax.devices())
    params = make_params(mesh)
    options = EngineOptions(max_batch=64, step_tokens=64, page_size=16)
    asked = []
    limit = bytes_per_device(params) + 2**20

    def footprint(lowering: Lowering, bucket: Bucket) -> Footprint:
        asked.append((bucket.kind, lowering.config.pools[0].pages))
        if len(asked) == 1:
            raise MemoryLimitError("no", 0)
        return Footprint(temporaries=1000, program=10)

    planned = build.plan_config(SPEC, params, mesh, options, limit, footprint)
    (_, first), *rest = asked
    assert first > 0.8 * planned.pools[0].pages and [pages for _, pages in rest] == [1, 1, 1]
    assert {kind for kind, _ in rest} == {"decode", "prefill", "score"}
    steps = len(BucketPlan.of(planned).buckets)
    # Bytes: layers, K and V, heads and their numbers, float32, tokens.
    page = 2 * 2 * 2 * 8 * 4 * 16
    state = abstract_state(SPEC, planned, mesh, reference)
    left = 2**20 - bytes_per_device(state.rows) - 1000 - 10 * steps
    assert planned.pools[0].pages == left // page


def test_kv_segments_in_transit_take_their_share_of_the_memory() -> None:
    """Four segments are counted, with the pages of the longest sequence in both layers."""
    mesh = MESH.build(jax.devices())
    params = make_params(mesh)
    options = EngineOptions(max_batch=64, step_tokens=64, page_size=16)

    def pages(options: EngineOptions) -> int:
        limit = bytes_per_device(params) + 2**20
        return (
            build.plan_config(SPEC, params, mesh, options, limit, lambda *_: Footprint(0, 0))
            .pools[0]
            .pages
        )

    assert pages(options) - pages(replace(options, page_exchange=True)) == 4 * 96 // 16


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_draft_model_takes_its_share_of_the_memory(tensor: int) -> None:
    """Weights of the draft model count, and every page takes more for its layer.

    The draft model has one layer, with heads of half the size.
    """
    mesh = MeshSpec(tensor=tensor).build(jax.devices())
    small = replace(SPEC, num_layers=1, head_dim=4)
    params = make_params(mesh)
    draft = DraftModel(small, make_params(mesh, spec=small))
    options = EngineOptions(max_batch=64, step_tokens=64, page_size=16, speculate="draft")
    wish = build.plan_config(SPEC, params, mesh, options, draft=draft)
    rows = bytes_per_device(abstract_state(SPEC, wish, mesh, reference).rows)
    limit = bytes_per_device([params, draft.params]) + rows + 2**16
    planned = build.plan_config(
        SPEC, params, mesh, options, limit, lambda *_: Footprint(0, 0), draft
    )
    # Bytes: K and V, heads and their numbers of each layer, float32.
    token = 2 * (2 * 8 * 2 + 2 * 4) * 4 // tensor
    assert planned.pools[0].pages == 2**16 // (token * 16) < wish.pools[0].pages
    drafter = ModelDrafter(draft, planned, mesh)
    assert drafter.cache_bytes(planned) == bytes_per_device(drafter.abstract_state)
    with pytest.raises(ConfigError, match="--speculate is draft; there is no draft model"):
        build.plan_config(SPEC, params, mesh, options)


def test_a_compiler_that_refuses_is_quoted() -> None:
    with (
        pytest.raises(
            MemoryLimitError, match=r"decode\[4\]: the compiler says RESOURCE_EXHAUSTED"
        ) as caught,
        memory_errors("decode[4]"),
    ):
        raise JaxRuntimeError(
            "RESOURCE_EXHAUSTED: temporaries (17.25G) exceed available HBM (15.75G).\nAnd more."
        )
    assert caught.value.missing == 1.5 * 2**30 and "\n" not in str(caught.value)
    with pytest.raises(JaxRuntimeError, match="INTERNAL"), memory_errors("decode[4]"):
        raise JaxRuntimeError("INTERNAL: a bug")


def test_a_cache_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = MESH.build(jax.devices())
    with pytest.raises(MemoryLimitError, match="--cache-tokens asks for"):
        build.plan_config(SPEC, make_params(mesh), mesh, EngineOptions(cache_tokens=10**12))
