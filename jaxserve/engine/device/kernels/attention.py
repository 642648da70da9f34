"""Which attention an engine's steps use, and what each page group asks of it."""

import logging

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import BucketPlan
from jaxserve.models.spec import ModelSpec, PageGroup
from pallas_kernels import dispatch
from pallas_kernels.paged_attention.api import Demand, KernelError, Options
from sharding.mesh import device_kind, platform

log = logging.getLogger("jaxserve.engine")


def attention_options(
    spec: ModelSpec,
    group: PageGroup,
    mesh: Mesh,
    page_size: int,
    dtype: jnp.dtype,
    most: int | None,
) -> Options:
    """Of one shard's heads. dtype: of pages. most: tokens per row, see Options."""
    layout = group.layout(page_size, dtype, shards=mesh.shape["tensor"])
    kind = device_kind(mesh)
    return Options(
        layout, spec.score_scale, group.window, spec.attn_softcap, most, device_kind=kind
    )


def choose_attention(spec: ModelSpec, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype) -> str:
    """The name of an implementation that can run every step of this engine; KernelError when the
    one asked for cannot.

    dtype: of queries. config.attention: a name, or auto. What auto passes over is logged.
    """
    stored = jnp.dtype(config.page_dtype)
    heads, kind = spec.num_heads // mesh.shape["tensor"], device_kind(mesh)
    steps = [
        (
            attention_options(spec, group, mesh, config.page_size, stored, bucket.max_row_tokens),
            Demand(heads, bucket.rows, config.pages_per_row, dtype, kind),
        )
        for group in spec.page_groups()
        for bucket in BucketPlan.of(config).buckets
    ]
    return dispatch.choose(config.attention, platform(mesh), steps, _log_refusal)


def _log_refusal(name: str, error: KernelError) -> None:
    log.warning("attention %r is passed over: %s", name, error)
