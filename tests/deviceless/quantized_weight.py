"""Quantized products of published models, compiled for an absent chip from shapes and dtypes."""

import importlib.util
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxserve.pallas_kernels.quantized_matmul.api import Demand, Options, QuantizedMatmul
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec, device_kind
from jaxserve.sharding.params import ParamSpec
from tests.deviceless.grouped_product import COMPILERS


@dataclass(frozen=True)
class Product:
    """A product of `rows` rows with a weight of these axes, the first of which is summed over."""

    name: str
    axes: str
    shape: tuple[int, ...]
    group: int
    rows: int

    def __str__(self) -> str:
        return f"{self.name}-g{self.group}-{self.rows}"


# Weights of one shard: of Llama-3-8B, of Llama-3-70B over eight devices, and of gpt-oss-20b's
# attention (heads of 64, 45 groups of 64).
WEIGHTS = [
    ("8b-qkv", "DKQH", (4096, 8, 6, 128)),
    ("8b-gate_up", "DCF", (4096, 2, 14336)),
    ("8b-down", "FD", (14336, 4096)),
    ("70b-o", "MD", (1024, 8192)),
    ("70b-gate_up", "DCF", (8192, 2, 3584)),
    ("20b-qkv", "DKQH", (2880, 8, 10, 64)),
]
PRODUCTS = [
    Product(name, axes, shape, group, rows)
    for name, axes, shape in WEIGHTS
    for group in (32, 64, 128)
    for rows in (1, 16, 64, 200, 1536)
    if shape[0] % group == 0
]


def compile_for(kernel: QuantizedMatmul, chip: str, product: Product) -> jax.stages.Compiled:
    """Compile a product; skip the test where the compiler is not installed."""
    compiler = COMPILERS[CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = MeshSpec().build(absent.devices(chip, 1))
    options = Options(device_kind(mesh))
    contracted, *columns = product.shape
    bfloat16 = jnp.dtype(jnp.bfloat16)
    kernel.check(options, Demand(contracted, tuple(columns), product.group, bfloat16))
    x = ParamSpec("TD", (product.rows, contracted), bfloat16)
    numbers = ParamSpec(product.axes, product.shape, jnp.dtype(jnp.int4), summed=product.axes[0])
    scales = ParamSpec(
        product.axes, (contracted // product.group, *columns), jnp.dtype(jnp.float32)
    )

    def multiply(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        return kernel.multiply(x, numbers, scales, options).astype(jnp.bfloat16)

    on_chip = jax.shard_map(
        multiply, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(on_chip).lower(*(spec.abstract(mesh) for spec in (x, numbers, scales))).compile()
