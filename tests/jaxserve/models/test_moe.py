"""Expert MLPs on meshes, compared with every token's own sum over its experts in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import moe, moe_sizes
from jaxserve.models.decoder import param_specs
from jaxserve.models.mixture import Mixture
from jaxserve.models.moe import Experts
from jaxserve.models.moe_sizes import all_to_all_capacity
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.grouped_matmul import reference
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import map_specs
from tests.random_weights import random_weights

MIXTURE = Mixture(experts=16, taken=2, d_expert=8, layers=(0,), d_shared=12, shared_gate=True)
SPEC = ModelSpec("test", 32, 16, 1, 4, 4, 8, 8, 1e-5, 64, mixture=MIXTURE)
TOKENS = 64  # of a lane


def weights_on(mesh: jax.sharding.Mesh, spec: ModelSpec) -> dict:
    specs = map_specs(
        lambda param: replace(param, std=0.5), param_specs(spec, jnp.dtype(jnp.float32))
    )
    return random_weights(specs, mesh, seed=3)["layers"][0]


def naive_mixture(
    mixture: Mixture, weights: dict, x: np.ndarray, live: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the answers, token by token, and how many tokens each expert has answered."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    x = x.astype(np.float64)

    def mlp(own: dict, v: np.ndarray) -> np.ndarray:
        both = np.einsum(
            "d,...cdf->...cf" if own["gate_up"].shape[0] == 2 else "d,dcf->cf", v, own["gate_up"]
        )
        return (both[0] / (1 + np.exp(-both[0])) * both[1]) @ own["down"]

    out = np.zeros_like(x)
    load = np.zeros(mixture.experts, int)
    for token, v in enumerate(x):
        if live[token]:
            scores = np.exp(v @ w["router"])
            taken = np.argsort(-scores)[: mixture.taken]
            load[taken] += 1
            for expert in taken:
                own = {name: w["experts"][name][expert] for name in ("gate_up", "down")}
                out[token] += scores[expert] / scores[taken].sum() * mlp(own, v)
        if mixture.d_shared:
            out[token] += mlp(w["shared"], v) / (1 + np.exp(-(v @ w["shared_gate"])))
    return out, load


def check(mesh_spec: MeshSpec, mixture: Mixture = MIXTURE, skewed: bool = False) -> None:
    spec = replace(SPEC, mixture=mixture)
    mesh = mesh_spec.build(jax.devices())
    weights = weights_on(mesh, spec)
    rng = np.random.default_rng(0)
    count = TOKENS * mesh_spec.lanes
    x = rng.standard_normal((count, spec.d_model)).astype(np.float32)
    live = rng.random(count) < 0.9
    if skewed:  # all tokens alike, but for a little: they want the same experts
        x = x[:1] + 0.01 * x
    experts = Experts(jnp.asarray(live), spec, mesh, reference)
    out, load = jax.jit(lambda w, x: experts(w, x))(weights, jnp.asarray(x))
    expected, counts = naive_mixture(mixture, weights, x, live)
    np.testing.assert_allclose(out, expected, atol=2e-4 * np.abs(expected).max())
    assert np.asarray(load).sum(0).tolist() == counts.tolist()


@pytest.mark.parametrize(
    "mesh",
    [
        (1, 1, 4),
        (1, 4, 2),
        *(
            pytest.param(m, marks=pytest.mark.slow)
            for m in ((1, 1, 1), (2, 1, 2), (1, 8, 1), (2, 4, 1))
        ),
    ],
)
def test_every_token_gets_its_experts_answers(mesh: tuple[int, int, int]) -> None:
    check(MeshSpec(*mesh))


@pytest.mark.parametrize(
    "mesh", [pytest.param((1, 4, 1), marks=pytest.mark.slow), (1, 4, 2), (2, 4, 1)]
)
def test_tokens_travel_by_all_to_all(
    mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_to_all_capacity(MIXTURE, TOKENS, 4) in range(TOKENS // 2, TOKENS)

    def gather(*_: object) -> jax.Array:
        return jnp.full((TOKENS, SPEC.d_model), jnp.nan)

    monkeypatch.setattr(Experts, "_by_all_gather", gather)
    check(MeshSpec(*mesh))


def test_tokens_that_all_want_one_shard_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_to_all(*_: object) -> jax.Array:
        return jnp.full((TOKENS, SPEC.d_model), jnp.nan)

    monkeypatch.setattr(Experts, "_by_all_to_all", all_to_all)
    check(MeshSpec(expert=4), skewed=True)


@pytest.mark.parametrize(
    ("mesh", "skewed"),
    [
        ((1, 4, 1), True),
        ((1, 2, 2), False),
        pytest.param((1, 4, 1), False, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), True, marks=pytest.mark.slow),
    ],
)
def test_more_than_is_expected_is_computed_in_turns(
    mesh: tuple[int, int, int], skewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_sizes, "ROWS_AT_ONCE", 8)
    check(MeshSpec(*mesh), skewed=skewed)


def test_room_is_left_where_it_saves_something() -> None:
    """The capacity is that of evenly routed tokens, or None where it saves too little.

    T (1 - (1 - 1/n)^X) and four standard deviations, rounded up to a multiple of 8.
    """
    eight_of_256 = replace(MIXTURE, experts=256, taken=8)
    assert all_to_all_capacity(eight_of_256, 1024, 1) is None  # nobody to send to
    assert all_to_all_capacity(eight_of_256, 1024, 4) is None  # a token goes to 90 % of the shards
    assert all_to_all_capacity(eight_of_256, 1024, 32) == 288  # 229.6 + 4 * 13.3
    assert all_to_all_capacity(MIXTURE, 8, 4) is None  # few tokens vary too much


def test_a_token_s_answer_is_the_same_whichever_way_it_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers are equal bit for bit: other tokens decide which way is taken."""
    mesh = MeshSpec(expert=4).build(jax.devices())
    weights = weights_on(mesh, SPEC)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4 * TOKENS, SPEC.d_model)), jnp.float32)
    experts = Experts(jnp.ones(len(x), bool), SPEC, mesh, reference)
    travelled, _ = jax.jit(lambda w, x: experts(w, x))(weights, x)
    monkeypatch.setattr(moe, "all_to_all_capacity", lambda *_: None)
    gathered, _ = jax.jit(lambda w, x: experts(w, x))(weights, x)
    np.testing.assert_array_equal(travelled, gathered)


def test_a_token_s_answer_is_the_same_however_many_turns_its_neighbours_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers are equal bit for bit: experts are added one by one, wherever a wave ends."""
    mixture = replace(MIXTURE, taken=5)
    spec = replace(SPEC, mixture=mixture)
    mesh = MeshSpec(expert=2).build(jax.devices())
    monkeypatch.setattr(moe_sizes, "ROWS_AT_ONCE", 8)
    weights = weights_on(mesh, spec)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * TOKENS, spec.d_model)).astype(np.float32)
    experts = Experts(jnp.ones(len(x), bool), spec, mesh, reference)
    answer = jax.jit(lambda w, x: experts(w, x))
    among_others, _ = answer(weights, jnp.asarray(x))
    alike = np.broadcast_to(
        x[1] + 0.01 * x, x.shape
    ).copy()  # the neighbours all want the same experts
    alike[0] = x[0]
    among_alike, _ = answer(weights, jnp.asarray(alike))
    np.testing.assert_array_equal(among_others[0], among_alike[0])
