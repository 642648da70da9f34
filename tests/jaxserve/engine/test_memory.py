"""The cache's size is planned from the compiler's figures."""

import jax
import pytest

from jaxserve.config import EngineOptions
from jaxserve.engine import build
from jaxserve.engine.memory import affordable_tokens, bytes_per_device, device_limit, token_bytes
from jaxserve.engine.state import abstract_state
from jaxserve.errors import ConfigError
from pallas_kernels.paged_attention import reference
from sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import SPEC, make_params

MESH = MeshSpec()


def test_bytes_of_a_token() -> None:
    """Two layers, K and V, 2 heads of 8, float32; half of it on each of two tensor-parallel devices."""
    assert token_bytes(SPEC, itemsize=4, tensor=1) == 2 * 2 * 2 * 8 * 4
    assert token_bytes(SPEC, itemsize=4, tensor=2) == 2 * 2 * 8 * 4


def test_bytes_per_device_counts_shards() -> None:
    one, two = MESH.build(jax.devices()), MeshSpec(tensor=2).build(jax.devices())
    whole, halved = (make_params(mesh)["layers"][0]["q"] for mesh in (one, two))
    assert bytes_per_device({"q": whole}) == whole.nbytes == 2 * bytes_per_device({"q": halved})


def test_affordable_tokens() -> None:
    assert affordable_tokens(limit=1000, weights=500, rows=100, temporaries=50, per_token=10) == 35
    with pytest.raises(ConfigError, match="no memory is left for the KV cache"):
        affordable_tokens(limit=1000, weights=900, rows=100, temporaries=50, per_token=10)


def test_the_host_lends_half_of_its_memory() -> None:
    assert 2**28 < device_limit(MESH.build(jax.devices())) < 2**44


def test_a_small_device_gets_a_smaller_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, rows, cache and the largest step's temporaries stay within the limit, and nearly fill it."""
    mesh = MESH.build(jax.devices())
    params = make_params(mesh)
    options = EngineOptions(max_batch=64, step_tokens=64, page_size=16)
    wish = build.plan_config(SPEC, params, mesh, options)
    assert wish.capacity == 64 * 96
    state = abstract_state(SPEC, wish, mesh, reference, params["embed"].dtype)
    fixed = bytes_per_device(params) + bytes_per_device(state.rows)
    limit = fixed + wish.capacity * 256  # no room for the temporaries
    monkeypatch.setattr(build, "device_limit", lambda mesh: limit)
    planned = build.plan_config(SPEC, params, mesh, options)
    assert 0 < planned.capacity < wish.capacity
    assert fixed + planned.capacity * 256 < limit


def test_a_cache_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = MESH.build(jax.devices())
    with pytest.raises(ConfigError, match="--cache-tokens asks for"):
        build.plan_config(SPEC, make_params(mesh), mesh, EngineOptions(cache_tokens=10**12))
