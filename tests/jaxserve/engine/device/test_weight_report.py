"""Tests of the weight report, against sizes computed from the shapes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.engine.device.lowering import abstract_params
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.engine.device.weight_report import describe_rounding, describe_weights, weight_sizes
from jaxserve.loading.spec import read_spec
from jaxserve.models.quant import SCHEMES, QuantScheme
from jaxserve.plan.model_config import read_config
from jaxserve.sharding.mesh import MeshSpec

PUBLISHED = Path(__file__).parents[3] / "published" / "configs"
BF16 = jnp.dtype(jnp.bfloat16)


def params_of(model: str, mesh: MeshSpec, scheme: QuantScheme | None = None) -> dict:
    built = mesh.build(jax.devices())
    return abstract_params(read_spec(read_config(model)[1])[1].on(mesh.tensor), BF16, built, scheme)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
@pytest.mark.parametrize("tensor", [1, 4])
def test_a_dense_model(name: str, bits: int, tensor: int) -> None:
    scheme = SCHEMES[name]
    params = params_of("llama3.1-8b", MeshSpec(tensor=tensor), scheme)
    attention = 4096 * 6144 + 4096 * 4096
    mlp = 3 * 4096 * 14336
    columns = 6144 // tensor + 4096  # scales of o are of its output, which every device has
    assert weight_sizes(params) == {
        "embedding": {"bfloat16": 2 * 128256 * 4096 // tensor},
        "attention": {
            str(scheme.dtype): 32 * attention * bits // 8 // tensor,
            "float32": 32 * 4 * columns,
        },
        "mlp": {
            str(scheme.dtype): 32 * mlp * bits // 8 // tensor,
            "float32": 32 * 4 * (2 * 14336 // tensor + 4096),
        },
        "norms and biases": {"bfloat16": 2 * 65 * 4096},
        "head": {"bfloat16": 2 * 128256 * 4096 // tensor},
    }


def test_a_mixture() -> None:
    params = params_of("qwen3-30b-a3b", MeshSpec(expert=4))
    sizes = weight_sizes(params)
    assert sizes["experts"] == {"bfloat16": 48 * 128 * 3 * 2048 * 768 * 2 // 4}
    assert sizes["mlp"] == {"bfloat16": 48 * 2048 * 128 * 2}, "routers"
    assert sum(sum(held.values()) for held in sizes.values()) == bytes_per_device(params)


def test_layers_with_states() -> None:
    """Qwen3.5-27B: 48 layers with projections of queries, keys, values, gates and rates."""
    params = params_of(str(PUBLISHED / "Qwen--Qwen3.5-27B.json"), MeshSpec())
    projected = 16 * 2 * 128 + 2 * 48 * 128 + 2 * 48
    numbers = 48 * (5120 * projected + 48 * 128 * 5120 + 10_240 * 4)
    assert weight_sizes(params)["recurrence"] == {"bfloat16": 2 * numbers, "float32": 48 * 48 * 4}


def test_in_words() -> None:
    sizes = {"embedding": {"bfloat16": 2**30}, "mlp": {"int8": 2**31, "float32": 2**20}}
    assert (
        describe_weights(sizes)
        == "3.00 GiB on each device: embedding 1.00 bfloat16, mlp 2.00 int8 + 0.00 float32"
    )
    assert describe_weights({"mlp": {"int8": 512}}) == "0.50 KiB on each device: mlp 0.50 int8"


def test_what_rounding_would_gain() -> None:
    head = {"embedding": {"float32": 2**34}, "norms and biases": {"float32": 2**20}}
    wide = describe_rounding(head | {"mlp": {"float32": 2**31}, "attention": {"float32": 2**30}})
    assert wide == (
        "--dtype bfloat16 would halve 3.00 GiB of float32; "
        "steps of few rows read the weights sooner"
    )
    routed = describe_rounding(head | {"mlp": {"float32": 9}, "experts": {"bfloat16": 2**20}})
    assert routed == (
        "--weights w8a8-int8 would halve 1.00 MiB of bfloat16; "
        "steps of few rows read the weights sooner"
    )
    assert describe_rounding(head | {"mlp": {"int8": 512, "float32": 16}}) is None
