"""Which grouped matrix product the expert layers of an engine's steps use."""

import logging
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import BucketPlan
from jaxserve.models.moe_sizes import kernel_demands
from jaxserve.models.quant import QuantScheme
from jaxserve.models.spec import ModelSpec
from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul.api import Demand, GroupedMatmul, Options
from sharding.mesh import platform

log = logging.getLogger("jaxserve.engine")


def choose_grouped_matmul(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    form: QuantScheme | None = None,
) -> str:
    """The name of an implementation that can run every step of this engine; KernelError when the
    one asked for cannot.

    config.grouped_matmul: a name, or auto. What auto passes over is logged. form: of quantized
    weights.
    """

    asked = partial(products_of_steps, spec, config, mesh, dtype=dtype, form=form)
    return dispatch.choose_grouped(config.grouped_matmul, platform(mesh), asked, _log_refusal)


def products_of_steps(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    kernel: GroupedMatmul,
    dtype: jnp.dtype,
    form: QuantScheme | None,
) -> list[tuple[Options, Demand]]:
    """What all steps of the engine ask of an implementation; nothing of a model without experts."""
    if spec.mixture is None:
        return []
    sizes = {bucket.tokens for bucket in BucketPlan.of(config).buckets}
    return [
        each
        for tokens in sorted(sizes)
        for each in kernel_demands(spec, tokens, mesh, kernel, dtype, form)
    ]


def _log_refusal(name: str, error: KernelError) -> None:
    log.warning("grouped-matmul %r is passed over: %s", name, error)
