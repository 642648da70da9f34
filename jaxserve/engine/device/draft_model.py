"""Draft model: a smaller decoder with weights and pages of its own that drafts tokens.

Speculative decoding by Leviathan et al. 2023 and Chen et al. 2023.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.config import EngineConfig
from jaxserve.engine.device.drafting import ModelPass
from jaxserve.engine.device.kernels.choice import (
    choose_attention,
    choose_grouped_matmul,
    choose_quantized_matmul,
    choose_recurrence,
)
from jaxserve.engine.device.lane_index import take
from jaxserve.engine.device.lowering import abstract_params
from jaxserve.engine.device.memory import cache_bytes
from jaxserve.engine.device.sharded_model import ShardedModel
from jaxserve.engine.device.state import State, abstract_state
from jaxserve.engine.device.token_layout import TokenLayout
from jaxserve.models.decoder import Forwarded
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.models.summed_last import product_in
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.errors import KernelError

log = logging.getLogger("jaxserve.engine")


@dataclass(frozen=True)
class DraftModel:
    """Specification and weights of a draft model, as the devices hold them."""

    spec: ModelSpec
    params: dict  # arrays, or their abstract values


@dataclass(frozen=True)
class ModelDrafter:
    """A Drafter (see device.drafting) that runs a draft model.

    Page n of the draft model belongs to page n of the model's first page group without a window,
    and is found by that group's tables. What the host allocates, shares and frees for the model
    therefore serves both. Layers of the draft model that have a window use the same tables.
    """

    model: DraftModel
    config: EngineConfig  # of the engine
    mesh: Mesh

    @property
    def params(self) -> dict:
        return self.model.params

    @cached_property
    def abstract_params(self) -> dict:
        scheme = scheme_in(self.params)
        product = product_in(self.params)
        return abstract_params(self.model.spec, self._dtype, self.mesh, scheme, product)

    @cached_property
    def abstract_state(self) -> Any:
        """Abstract pages of each of the draft model's layers."""
        kernel = dispatch.IMPLEMENTATIONS[self.attention]
        config = self._with_pools(self.config)
        return abstract_state(self.model.spec, config, self.mesh, kernel).kept

    @cached_property
    def attention(self) -> str:
        """Name of the attention kernel: the configured one, if it can run this model too."""
        spec = self.model.spec
        try:
            return choose_attention(spec, self.config, self.mesh, self._dtype)
        except KernelError as error:
            log.warning(
                "the draft model does not use attention %r: %s", self.config.attention, error
            )
            config = replace(self.config, attention="auto")
            return choose_attention(spec, config, self.mesh, self._dtype)

    @cached_property
    def _sharded(self) -> ShardedModel:
        args = self.model.spec, self.config, self.mesh, self._dtype, scheme_in(self.params)
        return ShardedModel(
            self.model.spec,
            self.mesh,
            dispatch.IMPLEMENTATIONS[self.attention],
            dispatch.GROUPED[choose_grouped_matmul(*args)],
            choose_quantized_matmul(*args),
            dispatch.RECURRENCES[choose_recurrence(*args[:3])],
            self.config.page_size,
            jnp.dtype(self.config.page_dtype),
        )

    @property
    def _dtype(self) -> jnp.dtype:
        return self.params["embed"].dtype

    def cache_bytes(self, config: EngineConfig) -> int:
        """Return the bytes that the draft model's pages of a lane take on one device.

        Args:
            config: Configuration of the engine, with the pools that are asked about.
        """
        kernel = dispatch.IMPLEMENTATIONS[self.attention]
        tensor = self.mesh.shape["tensor"]
        return cache_bytes(self.model.spec, self._with_pools(config), kernel, tensor)

    def _with_pools(self, config: EngineConfig) -> EngineConfig:
        """Give each page group of the draft model a pool as large as the one it shares ids with."""
        shared = config.pools[config.full_group]
        return replace(config, pools=(shared,) * len(self.model.spec.page_groups()))

    # ---- in a step

    def next(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A R"],
        layout: TokenLayout,
    ) -> tuple[Any, Float[Array, "B V"]]:
        done = self._forward(params, state, ids, tokens, layout, max_row_tokens=1)
        weights = self._sharded.bind_kernels(params["drafter"])
        return done.written, self._sharded.logits(weights, done.hidden)

    def observe(self, params: dict, state: State, model: ModelPass) -> Any:
        """Return the state as it is: a draft model reads its own hidden states only."""
        return state.drafter

    def catch_up(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A T"],
        layout: TokenLayout,
    ) -> tuple[Any, Float[Array, "A T D"]]:
        done = self._forward(params, state, ids, tokens, layout, max_row_tokens=None)
        return done.written, done.hidden.reshape(*tokens.shape, -1)

    def _forward(
        self,
        params: dict,
        state: State,
        ids: jax.Array,
        tokens: jax.Array,
        layout: TokenLayout,
        max_row_tokens: int | None,
    ) -> Forwarded:
        spec = self.model.spec
        table = take(state.rows.tables[self.config.full_group], ids)
        # The model's embedding table may be padded further than this one's.
        known = jnp.minimum(tokens, spec.vocab_size - 1)
        weights = self._sharded.bind_kernels(params["drafter"])
        tables = (table,) * len(spec.page_groups())
        return self._sharded.forward(weights, state.drafter, tables, known, layout, max_row_tokens)
