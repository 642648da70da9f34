"""The kernels that an engine's steps run, chosen from the configuration, the model and the mesh.

Each chooser asks the platform's kernels whether they can run everything that this engine needs of
them. With `auto` the first that can is taken, and the log says why others were passed over. A
kernel that is asked for by name is that one or a KernelError.
"""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.cpu_kernels.library import missing_level
from jaxserve.engine.buckets import BucketPlan
from jaxserve.models.decoder import param_specs
from jaxserve.models.layer_kind import DeltaState, PageGroup
from jaxserve.models.moe_sizes import kernel_demands
from jaxserve.models.quant import KernelBinding, Quantized, QuantScheme, contracted, is_quantized
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta import api as gated_delta
from jaxserve.pallas_kernels.grouped_matmul import api as grouped
from jaxserve.pallas_kernels.paged_attention import api as paged
from jaxserve.pallas_kernels.quantized_matmul import api as quantized
from jaxserve.sharding.mesh import device_kind, platform

log = logging.getLogger("jaxserve.engine")


# ---- attention


def choose_attention(spec: ModelSpec, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype) -> str:
    """Name the attention kernel that runs every step of this engine, for queries of `dtype`.

    Raises KernelError when config.attention names a kernel that cannot.
    """
    page_dtype = jnp.dtype(config.page_dtype)
    heads = spec.num_heads // mesh.shape["tensor"]
    kind = device_kind(mesh)
    steps = [
        (
            attention_options(
                spec, group, mesh, config.page_size, page_dtype, bucket.max_row_tokens
            ),
            paged.Demand(heads, bucket.rows, config.pages_per_row, dtype, kind),
        )
        for group in spec.page_groups()
        for bucket in BucketPlan.of(config).buckets
    ]
    return dispatch.choose(config.attention, platform(mesh), steps, _refusal_logger("attention"))


def attention_options(
    spec: ModelSpec,
    group: PageGroup,
    mesh: Mesh,
    page_size: int,
    page_dtype: jnp.dtype,
    max_row_tokens: int | None,
) -> paged.Options:
    """Attention options of one page group, for the heads of one shard.

    Args:
        max_row_tokens: Most tokens that one row has in the step; None when that is not bounded.
    """
    layout = group.layout(page_size, page_dtype, shards=mesh.shape["tensor"])
    kind = device_kind(mesh)
    return paged.Options(
        layout, spec.score_scale, group.window, spec.attn_softcap, max_row_tokens, device_kind=kind
    )


# ---- grouped matmul: the expert layers


def choose_grouped_matmul(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    scheme: QuantScheme | None = None,
) -> str:
    """Name the grouped-matmul kernel that runs the expert layers of every step of this engine.

    Args:
        dtype: Dtype of activations.

    Raises:
        KernelError: `config.grouped_matmul` names a kernel that cannot.
    """
    demands = partial(grouped_demands, spec, config, mesh, dtype=dtype, scheme=scheme)
    return dispatch.choose_grouped(
        config.grouped_matmul, platform(mesh), demands, _refusal_logger("grouped-matmul")
    )


def grouped_demands(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    kernel: grouped.GroupedMatmul,
    dtype: jnp.dtype,
    scheme: QuantScheme | None,
) -> list[tuple[grouped.Options, grouped.Demand]]:
    """List the expert kernel_demands of all steps; a model without experts has none.

    The kernel takes part because it decides how many rows its blocks have.
    """
    if spec.mixture is None:
        return []
    token_counts = {bucket.tokens for bucket in BucketPlan.of(config).buckets}
    return [
        product
        for tokens in sorted(token_counts)
        for product in kernel_demands(spec, tokens, mesh, kernel, dtype, scheme)
    ]


# ---- quantized matmul: weights with a scale per group of numbers


def choose_quantized_matmul(
    spec: ModelSpec, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, scheme: QuantScheme | None
) -> Mapping[str, KernelBinding]:
    """Map weight names to the quantized-matmul kernels that multiply them; XLA has the others.

    Each weight is decided by itself.

    Args:
        dtype: Dtype of activations.

    Raises:
        KernelError: `config.quantized_matmul` names a kernel that cannot multiply one of them.
    """
    found: dict[str, KernelBinding] = {}
    for name, weight in _weights_with_groups(spec, dtype, scheme).items():
        demand = _quantized_demand(name, weight, mesh, dtype)
        kernel = dispatch.choose_quantized(
            config.quantized_matmul,
            platform(mesh),
            (quantized.Options(device_kind(mesh)), demand),
            _refusal_logger("quantized-matmul", name),
        )
        if kernel != "reference":
            found[name] = KernelBinding(
                weight.values.axes, mesh, dispatch.QUANTIZED[kernel], demand
            )
    return found


def _weights_with_groups(
    spec: ModelSpec, dtype: jnp.dtype, scheme: QuantScheme | None
) -> dict[str, Quantized]:
    """Declarations of the weights that have a scale per group, without the experts', by name.

    One entry stands for the weights of this name in all layers, since layers declare them alike.
    """
    found: dict[str, Quantized] = {}
    specs = param_specs(spec, dtype, scheme)
    for weights in (specs, *specs["layers"]):
        for name, leaf in weights.items():
            if is_quantized(leaf) and leaf.scheme.group:
                found[name] = leaf
    return found


def _quantized_demand(
    name: str, weight: Quantized, mesh: Mesh, dtype: jnp.dtype
) -> quantized.Demand:
    """Describe the product with one shard of a weight."""
    assert weight.scheme.group
    values = weight.values
    shape = values.sharding(mesh).shard_shape(values.shape)
    summed = contracted(name, values.axes)
    columns = (*shape[: summed.start], *shape[summed.stop :])
    turned = summed.start > 0
    if turned:
        # models.layers.flatten brings such a weight's other dimensions together.
        columns = (math.prod(columns),)
    return quantized.Demand(math.prod(shape[summed]), columns, weight.scheme.group, dtype, turned)


# ---- recurrence: layers with the gated delta rule


def choose_recurrence(spec: ModelSpec, config: EngineConfig, mesh: Mesh) -> str:
    """Name the kernel that advances states in the decode steps of this engine.

    Raises KernelError when `config.recurrence` names a kernel that cannot.
    """
    return dispatch.choose_recurrence(
        config.recurrence,
        platform(mesh),
        recurrence_demands(spec, mesh),
        _refusal_logger("recurrence"),
    )


def recurrence_demands(
    spec: ModelSpec, mesh: Mesh
) -> list[tuple[gated_delta.Options, gated_delta.Demand]]:
    """List the states on one shard; a model without layers of the gated delta rule has none."""
    if not isinstance(spec.state, DeltaState):
        return []
    sizes = spec.state.sizes()
    heads = sizes["k"] // mesh.shape["tensor"]
    demand = gated_delta.Demand(heads, *(sizes[letter] for letter in "rdvt"))
    return [(gated_delta.Options(device_kind(mesh)), demand)]


def _refusal_logger(flag: str, weight: str = "") -> Callable[[str, KernelError], None]:
    """Make a function that logs which kernel `auto` passes over, and why."""
    subject = f" for {weight}" if weight else ""

    def log_refusal(kernel: str, error: KernelError) -> None:
        level = missing_level() if kernel == "cpu" else logging.WARNING
        log.log(level, "%s %r is passed over%s: %s", flag, kernel, subject, error)

    return log_refusal
