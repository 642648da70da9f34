"""From a model on a mesh and the operator's options to an engine: the one place where sizes are
decided.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.device.draft_model import DraftModel, ModelDrafter
from jaxserve.engine.device.drafting import Drafter
from jaxserve.engine.device.kernels.attention import choose_attention
from jaxserve.engine.device.lowering import Footprint, Lowering, abstract_params
from jaxserve.engine.device.memory import (
    Budget,
    affordable_pages,
    bytes_per_device,
    cache_bytes,
    check_fits,
    device_limit,
)
from jaxserve.engine.device.page_io import PageIO
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.device.state import abstract_state
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.prompt_lookup import PromptLookup
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import DeviceDrafts, Speculation
from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.models.quant import QuantScheme, scheme_in
from jaxserve.models.spec import ModelSpec
from pallas_kernels import dispatch
from sharding.mesh import crosses_slow_links, platform, spans_hosts
from sharding.rules import shards

NewRunner = Callable[[ModelSpec, dict, EngineConfig, Mesh, Drafter | None], DeviceRunner]
log = logging.getLogger("jaxserve.engine")

# Of the pages that there is room for beside weights and rows, those that steps are asked about
# with. libtpu makes programs smaller when a chip is nearly full (on a v5e a step of 55 MiB has 14
# from 12 GiB of arguments on), so that beside a small cache steps would seem to take more than they
# do.
PROBED = 7 / 8


def build_engine(
    spec: ModelSpec,
    params: dict,
    mesh: Mesh,
    options: EngineOptions,
    fingerprint: str,
    new_runner: NewRunner = DeviceRunner,
    draft: DraftModel | None = None,
) -> tuple[Engine, DeviceRunner]:
    """The engine, and its runner for warm-up and figures. ConfigError when the options cannot be
    met.
    """
    if options.page_exchange and spans_hosts(mesh):
        raise ConfigError(
            "--hosts: an engine on several hosts exchanges no pages with others (give each host "
            "its own)"
        )
    _warn_of_slow_links(spec, mesh, params["embed"].dtype)
    config = plan_config(spec, params, mesh, options, draft=draft)
    runner = new_runner(
        spec, params, config, mesh, ModelDrafter(draft, config, mesh) if draft else None
    )
    scheduler = Scheduler(config, fingerprint=fingerprint, speculation=speculation_of(config))
    return Engine(scheduler, runner, pages=runner if config.page_exchange else None), runner


def speculation_of(config: EngineConfig) -> Speculation | None:
    most = config.draft_tokens
    if not most:
        return None
    return Speculation(
        DeviceDrafts(most, has_pages=True) if config.drafts_by_model else PromptLookup(most), most
    )


def plan_config(
    spec: ModelSpec,
    params: dict,
    mesh: Mesh,
    options: EngineOptions,
    limit: int | None = None,
    footprint: Callable[[Lowering, Bucket], Footprint] = Lowering.footprint,
    draft: DraftModel | None = None,
) -> EngineConfig:
    """Resolve the options; the cache takes what rows can use, or what memory has room for if that
    is less.

    params: arrays, or their abstract values. limit: bytes that a device may use; None: ask it.
    footprint: says what a step takes. The compiler is asked about the largest steps only when the
    cache comes near the limit: each answer costs a compile. draft: what drafts for it, whose
    weights and pages are counted. MemoryLimitError when the model does not fit.
    """
    if draft is None and options.speculate == "draft":
        raise ConfigError("--speculate draft: there is no draft model (--draft-model)")
    dtype = params["embed"].dtype
    tensor = mesh.shape["tensor"]
    windows = [group.window for group in spec.page_groups()]

    def resolved(tokens: int) -> EngineConfig:
        lanes, positions = shards("A", mesh), spec.max_positions
        return resolve(
            options,
            max_positions=positions,
            lanes=lanes,
            affordable_tokens=tokens,
            windows=windows,
            min_rows=min_rows(mesh, dtype, scheme_in(params)),
            embeds=spec.embeds,
            weights=str(dtype),
        )

    options = replace(options, attention=choose_attention(spec, resolved(2**62), mesh, dtype))
    wish = resolved(2**62)
    kernel = dispatch.IMPLEMENTATIONS[wish.attention]

    drafter = ModelDrafter(draft, wish, mesh) if draft else None

    def bytes_with(config: EngineConfig) -> int:
        return cache_bytes(spec, config, kernel, tensor) + (
            drafter.cache_bytes(config) if drafter else 0
        )

    def bytes_of(pages: int) -> int:
        return bytes_with(resolved(pages * wish.page_size))

    rows = bytes_per_device(abstract_state(spec, wish, mesh, kernel).rows)
    weights = bytes_per_device([params, drafter.params if drafter else {}])
    pieces = PageIO(spec, wish, mesh, kernel, dtype).most_bytes
    budget = Budget(device_limit(mesh) if limit is None else limit, weights, rows, pieces=pieces)
    cache = bytes_with(wish)
    if options.cache_tokens:
        check_fits(budget, cache)
        return wish
    if budget.weights + budget.rows + budget.pieces + cache < budget.limit / 2:
        return wish
    most = max(pool.pages for pool in wish.pools)
    room = affordable_pages(budget, bytes_of, most)

    def asked(pages: int) -> Budget:
        abstract = abstract_params(spec, dtype, mesh, scheme_in(params))
        config = resolved(pages * wish.page_size)
        probe = Lowering(
            spec, abstract, config, mesh, ModelDrafter(draft, config, mesh) if draft else None
        )
        return with_steps(budget, BucketPlan.of(wish), partial(footprint, probe))

    try:
        budget = asked(max(int(room * PROBED), 1))
    except MemoryLimitError:  # beside so many pages, a TPU's compiler refuses a step
        budget = asked(1)
    return resolved(affordable_pages(budget, bytes_of, most) * wish.page_size)


def with_steps(
    budget: Budget, plan: BucketPlan, footprint: Callable[[Bucket], Footprint]
) -> Budget:
    """With what the plan's steps take, as if every step took as much as the widest of its kind."""
    widest = {bucket.kind: bucket for bucket in sorted(plan.buckets)}  # the last of each kind
    needs = {kind: footprint(bucket) for kind, bucket in widest.items()}
    return replace(
        budget,
        temporaries=max(need.temporaries for need in needs.values()),
        programs=sum(needs[bucket.kind].program for bucket in plan.buckets),
    )


def _warn_of_slow_links(spec: ModelSpec, mesh: Mesh, dtype: jnp.dtype) -> None:
    """Tensor parallelism adds up the hidden state of every token, after the embedding and twice in
    each layer.
    """
    if crosses_slow_links(mesh, "tensor"):
        sums = 2 * spec.num_layers + 1
        log.warning(
            "--tensor %d spans hosts: they exchange %d sums, %.0f KiB in all, for every token "
            "(a --tensor that fits into one host, and --data across them, exchanges none)",
            mesh.shape["tensor"],
            sums,
            sums * spec.d_model * dtype.itemsize / 1024,
        )


def min_rows(mesh: Mesh, dtype: jnp.dtype, form: QuantScheme | None = None) -> int:
    """2 for products of bfloat16 or int8 on a CPU: XLA:CPU has no kernel for one row and takes
    longer.
    """
    narrow = dtype == jnp.bfloat16 or (form is not None and form.activations)
    return 2 if platform(mesh) == "cpu" and narrow else 1
