"""From a model on a mesh and the operator's options to an engine: the one place where sizes are decided."""

from dataclasses import replace

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.engine.attention import choose_attention
from jaxserve.engine.buckets import BucketPlan
from jaxserve.engine.engine import Engine
from jaxserve.engine.lowering import Lowering, abstract
from jaxserve.engine.memory import affordable_pages, bytes_per_device, cache_bytes, check_fits, device_limit
from jaxserve.engine.runner import DeviceRunner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.state import abstract_state
from jaxserve.models.spec import ModelSpec
from pallas_kernels import dispatch
from sharding.mesh import platform
from sharding.rules import shards


def build_engine(
    spec: ModelSpec, params: dict, mesh: Mesh, options: EngineOptions, fingerprint: str
) -> tuple[Engine, DeviceRunner]:
    """The engine, and its runner for warm-up and figures. ConfigError when the options cannot be met."""
    config = plan_config(spec, params, mesh, options)
    runner = DeviceRunner(spec, params, config, mesh)
    scheduler = Scheduler(config, fingerprint=fingerprint)
    return Engine(scheduler, runner), runner


def plan_config(spec: ModelSpec, params: dict, mesh: Mesh, options: EngineOptions) -> EngineConfig:
    """Resolve the options; the cache takes what rows can use, or what memory has room for if that is less.

    The largest steps' temporaries are asked of the compiler only when the cache comes near the limit: each answer
    costs a compile.
    """
    dtype = params["embed"].dtype
    tensor = mesh.shape["tensor"]
    limit, weights = device_limit(mesh), bytes_per_device(params)
    windows = [group.window for group in spec.page_groups()]

    def resolved(tokens: int) -> EngineConfig:
        lanes, positions = shards("A", mesh), spec.max_positions
        return resolve(
            options,
            max_positions=positions,
            lanes=lanes,
            affordable_tokens=tokens,
            windows=windows,
            min_rows=min_rows(mesh, dtype),
            embeds=spec.embeds,
        )

    options = replace(options, attention=choose_attention(spec, resolved(2**62), mesh, dtype))
    wish = resolved(2**62)
    kernel = dispatch.IMPLEMENTATIONS[wish.attention]
    state = abstract_state(spec, wish, mesh, kernel, dtype)
    rows = bytes_per_device(state.rows)
    cache = cache_bytes(spec, wish, kernel, dtype, tensor)
    if options.cache_tokens:
        check_fits(limit, weights, rows, cache)
        return wish
    if weights + rows + cache < limit / 2:
        return wish
    probe = Lowering(spec, abstract(params), resolved(wish.page_size), mesh)  # a TPU's compiler refuses what cannot fit
    widest = {b.kind: b for b in sorted(BucketPlan.of(wish).buckets)}.values()  # the last of each kind
    temporaries = max(probe.temporaries(bucket) for bucket in widest)

    def bytes_of(pages: int) -> int:
        return cache_bytes(spec, resolved(pages * wish.page_size), kernel, dtype, tensor)

    most = max(pool.pages for pool in wish.pools)
    return resolved(affordable_pages(limit, weights, rows, temporaries, bytes_of, most) * wish.page_size)


def min_rows(mesh: Mesh, dtype: jnp.dtype) -> int:
    """2 for bfloat16 on a CPU: XLA:CPU has no kernel for one row of it and takes ten times the time of two."""
    return 2 if platform(mesh) == "cpu" and dtype == jnp.bfloat16 else 1
