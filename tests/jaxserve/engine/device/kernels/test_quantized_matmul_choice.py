"""Tests of the choice of quantized-matmul kernels, weight by weight, for absent chips."""

import logging
from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, Mesh

from jaxserve.config import EngineConfig, resolve
from jaxserve.engine.device.kernels.choice import choose_quantized_matmul
from jaxserve.models.layer_kind import Latent, LayerKind
from jaxserve.models.quant import SCHEMES
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.quantized_matmul import gpu, tpu
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import BASE, SPEC

BF16 = jnp.dtype(jnp.bfloat16)
G32 = SCHEMES["int4-g32"]
WIDE = replace(SPEC, d_model=64, head_dim=64, d_mlp=256)
# A query of its own rank: its second matrix sums over its last dimension.
LATENT_LAYER = LayerKind(latent=Latent(64, rank=64, head=64, rotated=32, value=64))
LATENT = replace(WIDE, num_kv_heads=1, head_dim=96, layers=(LATENT_LAYER,) * 2)


def mesh_of(kind: str, platform: str) -> Mesh:
    return MeshSpec(tensor=2).without_devices(AbstractDevice(kind, None, platform=platform))


def config(name: str = "auto") -> EngineConfig:
    options = replace(BASE, quantized_matmul=name)
    return resolve(options, max_positions=96, lanes=1, affordable_tokens=10**6, weights="bfloat16")


@pytest.mark.parametrize(
    ("kind", "platform", "kernel"), [("NVIDIA H200", "gpu", gpu), ("TPU v5 lite", "tpu", tpu)]
)
def test_every_weight_has_a_kernel(kind: str, platform: str, kernel: object) -> None:
    found = choose_quantized_matmul(WIDE, config(), mesh_of(kind, platform), BF16, G32)
    assert {name: weight.axes for name, weight in found.items()} == {
        "qkv": "DKQH",
        "o": "NHD",
        "gate_up": "DCF",
        "down": "FD",
    }
    assert all(weight.kernel is kernel for weight in found.values())


def test_a_weight_that_is_kept_turned_stays_xlas_on_a_tpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = choose_quantized_matmul(LATENT, config(), mesh_of("TPU v5 lite", "tpu"), BF16, G32)
    assert set(found) == {"compress", "o", "gate_up", "down"}
    assert (
        "'tpu' is passed over for query: a weight whose last dimension is summed over"
        in caplog.text
    )
    assert "query" in choose_quantized_matmul(
        LATENT, config(), mesh_of("NVIDIA H200", "gpu"), BF16, G32
    )


def test_a_kernel_by_name_is_that_one_or_an_error() -> None:
    v5e = mesh_of("TPU v5 lite", "tpu")
    assert not choose_quantized_matmul(WIDE, config("reference"), v5e, BF16, G32)
    with pytest.raises(KernelError, match="a weight whose last dimension is summed over"):
        choose_quantized_matmul(LATENT, config("tpu"), v5e, BF16, G32)
    with pytest.raises(
        KernelError,
        match=r"'gpu' runs on 'gpu', and this is 'tpu'; choose auto \(--quantized-matmul\)",
    ):
        choose_quantized_matmul(WIDE, config("gpu"), v5e, BF16, G32)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_other_weights_ask_no_kernel(weights: str | None) -> None:
    scheme = SCHEMES[weights] if weights else None
    assert not choose_quantized_matmul(
        WIDE, config("tpu"), mesh_of("NVIDIA H200", "gpu"), BF16, scheme
    )
