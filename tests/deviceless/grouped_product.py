"""Expert products of published models, compiled for an absent chip from shapes and dtypes."""

import importlib.util
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec

from jaxserve.models.quant import SCHEMES
from jaxserve.pallas_kernels.grouped_matmul.api import Demand, GroupedMatmul, Groups, Options
from jaxserve.pallas_kernels.grouped_matmul.grouping import blocks_needed
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec, device_kind
from jaxserve.sharding.rules import replicated

COMPILERS = {"tpu": "libtpu", "gpu": "jax_cuda13_plugin"}


@dataclass(frozen=True)
class Model:
    """Sizes of a model's experts.

    experts: on one shard, of `total`. per_token: experts that a token takes. model, mlp: widths.
    """

    name: str
    experts: int
    total: int
    per_token: int
    model: int
    mlp: int


MODELS = [
    Model("mixtral-8x7b", 8, 8, 2, 4096, 14336),
    Model("qwen3-30b-a3b", 128, 128, 8, 2048, 768),
    Model("gpt-oss-120b", 128, 128, 4, 2880, 2880),
    Model("deepseek-v3", 16, 256, 8, 7168, 2048),
]


@dataclass(frozen=True)
class Product:
    """One of an expert layer's two products, in a step of `tokens` tokens.

    up: the first, gate and up side by side; otherwise down. weights: as --weights names them, where
    they are quantized.
    """

    model: Model
    tokens: int
    up: bool
    dtype: str = "bfloat16"
    weights: str = ""

    def __str__(self) -> str:
        side = "up" if self.up else "down"
        return f"{self.model.name}-{self.tokens}-{side}-{self.weights or self.dtype}"

    def options(self, kernel: GroupedMatmul, kind: str) -> Options:
        dtype = jnp.dtype(self.dtype)
        expected = max(1, self.tokens * self.model.per_token // self.model.total)
        return Options(kernel.block_rows(dtype, expected), dtype, kind)

    def demand(self, options: Options) -> Demand:
        model = self.model
        rows = (
            blocks_needed(self.tokens * model.per_token, model.experts, options.block)
            * options.block
        )
        sizes = (2, model.model, model.mlp) if self.up else (1, model.mlp, model.model)
        demand = Demand(rows, model.experts, *sizes, jnp.dtype(self.dtype), options.device_kind)
        if not self.weights:
            return demand
        scheme = SCHEMES[self.weights]
        return demand._replace(
            numbers=scheme.dtype, scales=sizes[1] // scheme.group if scheme.group else 1
        )


PRODUCTS = [
    Product(model, tokens, up) for model in MODELS for tokens in (64, 2048) for up in (True, False)
]
QUANTIZED = [  # sums of 2,880 numbers have no groups of 128
    replace(product, weights=scheme)
    for product in PRODUCTS
    for scheme, kept in SCHEMES.items()
    if not (kept.activations or (product.model.model == 2880 and scheme == "int4-g128"))
]


def compile_for(
    kernel: GroupedMatmul, chip: str, product: Product
) -> tuple[jax.stages.Compiled, Options, Demand]:
    """Compile a product with what a model makes of its result.

    Skips the test where the compiler is not installed.
    """
    compiler = COMPILERS[CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = MeshSpec().build(absent.devices(chip, 1))
    options = product.options(kernel, device_kind(mesh))
    demand = product.demand(options)
    kernel.check(options, demand)

    def multiply(
        x: jax.Array, weight: jax.Array, groups: Groups, scales: jax.Array | None
    ) -> jax.Array:
        found = kernel.multiply(x, weight, groups, options, scales)
        return jax.nn.silu(found[:, 0]) * found[:, 1] if product.up else found[:, 0]

    def row_major(dimensions: int) -> Format:
        """Return the format in which rows are contiguous.

        By default XLA transposes arrays whose rows are no multiple of 128 numbers, and transposes
        them back for the kernel.
        """
        return Format(Layout(tuple(range(dimensions))), replicated(mesh))

    def argument(dtype: str | jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=row_major(len(shape)))

    x = argument(product.dtype, demand.rows, demand.contracted)
    weight = argument(
        demand.stored_dtype, demand.experts, demand.parts, demand.contracted, demand.columns
    )
    scales = (
        argument("float32", *weight.shape[:2], demand.scales, demand.columns)
        if demand.scales
        else None
    )
    groups = Groups(argument("int32", demand.rows // options.block), argument("int32"))
    on_chip = jax.shard_map(
        multiply, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    return (
        jax.jit(on_chip, out_shardings=row_major(2)).lower(x, weight, groups, scales).compile(),
        options,
        demand,
    )
