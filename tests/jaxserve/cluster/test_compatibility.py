"""Digests of weights: equal on every mesh, different for different weights."""

from pathlib import Path

import jax
import pytest

from jaxserve.cluster.compatibility import facts_of_weights, norm_digest
from jaxserve.loading.parameters import load_params
from jaxserve.loading.spec import open_checkpoint
from jaxserve.sharding.mesh import MeshSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "llama_gqa"  # two kv heads


def params_on(tensor: int, weights: str = "auto") -> dict:
    mesh = MeshSpec(tensor=tensor).build(jax.devices()[:tensor])
    return load_params(open_checkpoint(GOLDEN), mesh, weights=weights)


@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "fp8"])
def test_every_mesh_says_the_same(weights: str) -> None:
    """Meshes divide heads and their copies differently."""
    one, *others = (params_on(tensor, weights) for tensor in (1, 2, 4))
    assert [facts_of_weights(other) for other in others] == 2 * [facts_of_weights(one)]
    assert [norm_digest(other) for other in others] == 2 * [norm_digest(one)]


def test_other_forms_and_other_weights_say_something_else() -> None:
    """Digests differ even where the norms are equal, as those of a merged LoRA are."""
    params = params_on(2)
    layer, *others = params["layers"]
    for name in ("qkv", "o", "gate_up", "down"):
        tuned = {**params, "layers": [{**layer, name: layer[name] * 1.01}, *others]}
        assert norm_digest(tuned) == norm_digest(params)
        assert facts_of_weights(tuned) != facts_of_weights(params)
    assert (
        len({str(facts_of_weights(params_on(1, form))) for form in ("auto", "int8", "int4", "fp8")})
        == 4
    )
