"""Building an engine from a model on a mesh and the operator's options.

This is the one place where sizes are decided.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, EngineOptions, check_snapshots, resolve
from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.device.draft_model import DraftModel, ModelDrafter
from jaxserve.engine.device.drafting import Drafter
from jaxserve.engine.device.kernels.choice import choose_attention
from jaxserve.engine.device.lowering import Footprint, Lowering, abstract_params
from jaxserve.engine.device.memory import (
    MemoryBudget,
    affordable_pages,
    bytes_of_others,
    bytes_per_device,
    cache_bytes,
    check_fits,
    device_limit,
    state_sizes,
)
from jaxserve.engine.device.page_io import PageIO
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.device.state import abstract_state
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.prompt_lookup import PromptLookup
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import DeviceDrafts, Proposer, Speculation
from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.flag_errors import flag_error
from jaxserve.models.layer_kind import DeltaState
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.models.summed_last import product_in
from jaxserve.pallas_kernels import dispatch
from jaxserve.sharding.mesh import crosses_slow_links, platform, spans_hosts
from jaxserve.sharding.rules import shards

NewRunner = Callable[[ModelSpec, dict, EngineConfig, Mesh, Drafter | None], DeviceRunner]
StepFootprint = Callable[[Lowering, Bucket], Footprint]
log = logging.getLogger("jaxserve.engine")

UNLIMITED_TOKENS = 2**62

# The compiler is asked what steps take beside a cache of this share of the pages for which weights
# and rows leave room. libtpu makes programs smaller when a chip is nearly full (on a v5e a step of
# 55 MiB has 14 from 12 GiB of arguments on): beside a small cache, steps would seem to take more
# than they do.
PROBED_SHARE = 7 / 8


def build_engine(
    spec: ModelSpec,
    params: dict,
    mesh: Mesh,
    options: EngineOptions,
    fingerprint: str,
    new_runner: NewRunner = DeviceRunner,
    draft: DraftModel | None = None,
) -> tuple[Engine, DeviceRunner]:
    """Return an engine, and its runner for warm-up and figures.

    Raises ConfigError if the options cannot be met.
    """
    if options.page_exchange and spans_hosts(mesh):
        raise ConfigError(
            "--hosts: an engine on several hosts exchanges no pages with others (give each host "
            "its own)"
        )
    _warn_of_slow_links(spec, mesh, params["embed"].dtype)
    config = plan_config(spec, params, mesh, options, draft=draft)
    drafter = ModelDrafter(draft, config, mesh) if draft else None
    runner = new_runner(spec, params, config, mesh, drafter)
    scheduler = Scheduler(config, fingerprint=fingerprint, speculation=speculation_of(config))
    return Engine(scheduler, runner, pages=runner.pages if config.page_exchange else None), runner


def speculation_of(config: EngineConfig) -> Speculation | None:
    """Return what drafts tokens under this configuration, None if nothing does."""
    limit = config.draft_tokens
    if not limit:
        return None
    proposer: Proposer = PromptLookup(limit)
    if config.drafts_by_model:
        proposer = DeviceDrafts(limit, has_pages=True)
    return Speculation(proposer, limit)


def plan_config(
    spec: ModelSpec,
    params: dict,
    mesh: Mesh,
    options: EngineOptions,
    limit: int | None = None,
    footprint: StepFootprint = Lowering.footprint,
    draft: DraftModel | None = None,
) -> EngineConfig:
    """Resolve the options; the cache takes what rows can use, or less if memory has no more room.

    Args:
        params: Arrays, or their abstract values.
        limit: Bytes that a device may use; None to ask the device.
        footprint: Function that returns what a step takes.
        draft: Model that drafts tokens, whose weights and pages are counted.

    Raises:
        MemoryLimitError: The model does not fit.
    """
    if draft is None and options.speculate == "draft":
        raise flag_error("--speculate", "draft", "there is no draft model (--draft-model)")
    planner = _MemoryPlanner(spec, params, mesh, options, draft)
    wanted = planner.config(UNLIMITED_TOKENS)
    cache = planner.cache_bytes(wanted)
    budget = planner.budget(wanted, limit)
    if options.cache_tokens:
        check_fits(budget, cache)
        return wanted
    # The compiler is asked only when the cache comes near the limit: each answer is a compile.
    if budget.limit - budget.left + cache < budget.limit / 2:
        return wanted
    max_pages = max(pool.pages for pool in wanted.page_pools)
    room = affordable_pages(budget, planner.cache_bytes_of_pages, max_pages)
    try:
        budget = planner.with_footprints(budget, max(int(room * PROBED_SHARE), 1), footprint)
    except MemoryLimitError:
        # Beside so many pages, a TPU's compiler refuses a step.
        budget = planner.with_footprints(budget, 1, footprint)
    pages = affordable_pages(budget, planner.cache_bytes_of_pages, max_pages)
    return planner.config_of_pages(pages)


class _MemoryPlanner:
    """Configurations of one engine by the size of its cache, and what they take on each device."""

    def __init__(
        self,
        spec: ModelSpec,
        params: dict,
        mesh: Mesh,
        options: EngineOptions,
        draft: DraftModel | None,
    ):
        self._spec = spec
        self._params = params
        self._mesh = mesh
        self._draft = draft
        self._dtype = params["embed"].dtype
        self._form = scheme_in(params)
        self._product = product_in(params)
        models = [(spec, params)] + ([(draft.spec, draft.params)] if draft else [])
        self._min_rows = max(min_rows(each, held, mesh) for each, held in models)
        check_snapshots(options, spec.state is not None)
        if draft and draft.spec.state:
            problem = "the draft model's layers have a recurrent state, which no draft can leave"
            raise flag_error("--speculate", "draft", f"{problem} (choose another)")
        self._options = options
        # The choice of a kernel needs a configuration: that of the options as they are.
        attention = choose_attention(spec, self.config(UNLIMITED_TOKENS), mesh, self._dtype)
        self._options = replace(options, attention=attention)
        self._kernel = dispatch.IMPLEMENTATIONS[attention]
        self._page_size = self.config(UNLIMITED_TOKENS).page_size
        self._drafter = self._drafter_for(self.config(UNLIMITED_TOKENS))

    def config(self, tokens: int) -> EngineConfig:
        """Return the configuration of an engine that has memory for this many tokens per lane."""
        return resolve(
            self._options,
            max_positions=self._spec.max_positions,
            lanes=shards("A", self._mesh),
            affordable_tokens=tokens,
            windows=[group.window for group in self._spec.page_groups()],
            states=state_sizes(self._spec),
            min_rows=self._min_rows,
            embeds=self._spec.embeds,
            weights=str(self._dtype),
            context_note=self._spec.context_note,
        )

    def config_of_pages(self, pages: int) -> EngineConfig:
        """Return the configuration of an engine that has memory for this many pages per lane."""
        return self.config(pages * self._page_size)

    def cache_bytes(self, config: EngineConfig) -> int:
        """Return the bytes per device of the pages, those of the draft model included."""
        size = cache_bytes(self._spec, config, self._kernel, self._mesh.shape["tensor"])
        if self._drafter:
            size += self._drafter.cache_bytes(config)
        return size

    def cache_bytes_of_pages(self, pages: int) -> int:
        """Return the bytes per device of the cache with this many pages per lane."""
        return self.cache_bytes(self.config_of_pages(pages))

    def budget(self, config: EngineConfig, limit: int | None) -> MemoryBudget:
        """Return what each device has and what is taken of it, steps left out.

        `limit` is as in plan_config.
        """
        state = abstract_state(self._spec, config, self._mesh, self._kernel)
        page_io = PageIO(self._spec, config, self._mesh, self._kernel, self._dtype)
        own = [self._params, self._drafter.params if self._drafter else {}]
        return MemoryBudget(
            device_limit(self._mesh) if limit is None else limit,
            others=bytes_of_others(self._mesh, own) if limit is None else 0,
            weights=bytes_per_device(own),
            rows=bytes_per_device(state.rows),
            transit=page_io.transit_bytes,
        )

    def with_footprints(
        self, budget: MemoryBudget, pages: int, footprint: StepFootprint
    ) -> MemoryBudget:
        """Return the budget with what steps take beside a cache of this many pages."""
        config = self.config_of_pages(pages)
        params = abstract_params(self._spec, self._dtype, self._mesh, self._form, self._product)
        lowering = Lowering(self._spec, params, config, self._mesh, self._drafter_for(config))
        buckets = BucketPlan.of(self.config(UNLIMITED_TOKENS))
        return with_steps(budget, buckets, partial(footprint, lowering))

    def _drafter_for(self, config: EngineConfig) -> ModelDrafter | None:
        return ModelDrafter(self._draft, config, self._mesh) if self._draft else None


def with_steps(
    budget: MemoryBudget, plan: BucketPlan, footprint: Callable[[Bucket], Footprint]
) -> MemoryBudget:
    """Return the budget with what the plan's steps take.

    Every step is taken to need as much as the widest of its kind: one footprint of each kind.
    """
    widest = {bucket.kind: bucket for bucket in sorted(plan.buckets)}  # the last of each kind
    needs = {kind: footprint(bucket) for kind, bucket in widest.items()}
    return replace(
        budget,
        temporaries=max(need.temporaries for need in needs.values()),
        programs=sum(needs[bucket.kind].program for bucket in plan.buckets),
    )


def _warn_of_slow_links(spec: ModelSpec, mesh: Mesh, dtype: jnp.dtype) -> None:
    """Warn if tensor parallelism spans hosts.

    It sums up the hidden state of every token, after the embedding and twice in each layer.
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


def min_rows(spec: ModelSpec, params: dict, mesh: Mesh) -> int:
    """Return the fewest rows that steps of a model are compiled for.

    2 for products of bfloat16 or int8 by XLA:CPU, which has none for one row and takes longer. The
    kernel of a CPU has; experts, the matrices of latent attention that are applied head by head,
    the rates of layers with a state, and widened weights are XLA's nevertheless.

    Args:
        params: Arrays, declarations or abstract values.
    """
    scheme = scheme_in(params)
    multiplies_int8 = scheme is not None and scheme.activations
    is_narrow = params["embed"].dtype == jnp.bfloat16 or multiplies_int8
    is_widened = scheme is not None and not multiplies_int8
    is_by_xla = is_widened or product_in(params) is None
    has_rates = isinstance(spec.state, DeltaState)
    has_products_of_xla = is_by_xla or spec.mixture or spec.latent or has_rates
    return 2 if platform(mesh) == "cpu" and is_narrow and has_products_of_xla else 1
