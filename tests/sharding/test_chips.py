"""Chips that multiply 8-bit numbers: by data sheet, and other GPUs by compute capability."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, Mesh

from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.native_products import multiplies_natively

INT8 = jnp.dtype("int8")
FP8 = jnp.dtype("float8_e4m3fn")
KNOWN = {
    "v4": (False, False),
    "v5e": (True, False),
    "v5p": (True, False),
    "v6e": (True, False),
    "7x": (False, True),
    "h200": (True, True),
}


@pytest.mark.parametrize("name", CHIPS)
def test_known_chips(name: str) -> None:
    chip = CHIPS[name]
    mesh = MeshSpec().without_devices(AbstractDevice(chip.kind, chip.cores, chip.platform))
    assert (multiplies_natively(mesh, INT8), multiplies_natively(mesh, FP8)) == KNOWN[name]
    for peak in (chip.int8, chip.fp8):
        assert not peak or peak / chip.flops == pytest.approx(2, rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "capability", "expected"),
    [
        ("Tesla T4", "7.5", (False, False)),
        ("NVIDIA A100-SXM4-80GB", "8.0", (True, False)),
        ("NVIDIA L40S", "8.9", (True, True)),
        ("NVIDIA H100 80GB HBM3", "9.0", (True, True)),
        ("NVIDIA B200", "10.0", (True, True)),
        ("AMD Instinct MI300X", "gfx942", (False, False)),
        ("TPU v3", None, (False, False)),
    ],
)
def test_other_chips(kind: str, capability: str | None, expected: tuple[bool, bool]) -> None:
    device = SimpleNamespace(device_kind=kind, platform="tpu" if capability is None else "gpu")
    if capability is not None:
        device.compute_capability = capability
    devices: Any = np.array([device], dtype=object)
    mesh = cast(Mesh, SimpleNamespace(devices=devices))
    assert (multiplies_natively(mesh, INT8), multiplies_natively(mesh, FP8)) == expected


def test_a_cpu_computes_what_it_is_asked_to() -> None:
    mesh = MeshSpec().build(jax.devices())
    assert multiplies_natively(mesh, INT8) and multiplies_natively(mesh, FP8)
