"""A draft model: a smaller decoder with weights and pages of its own (Leviathan et al. 2023, Chen
et al. 2023).
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
from jaxserve.engine.device.drafting import Computed
from jaxserve.engine.device.kernels.attention import choose_attention
from jaxserve.engine.device.kernels.grouped_matmul import choose_grouped_matmul
from jaxserve.engine.device.kernels.quantized_matmul import choose_quantized_matmul
from jaxserve.engine.device.lowering import abstract_params
from jaxserve.engine.device.memory import cache_bytes
from jaxserve.engine.device.sharded_model import Network
from jaxserve.engine.device.state import State, abstract_state
from jaxserve.engine.device.token_layout import Place, take
from jaxserve.models.decoder import Forwarded
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError

log = logging.getLogger("jaxserve.engine")


@dataclass(frozen=True)
class DraftModel:
    """spec: as the devices hold it. params: arrays, or their abstract values."""

    spec: ModelSpec
    params: dict


@dataclass(frozen=True)
class ModelDrafter:
    """An engine.drafting.Drafter. config: of the engine.

    Its pages have the numbers of the first page group without a window, and are found by that
    group's tables: what the host allocates, shares and gives back for the model it does for both.
    Layers with a window use the same tables.
    """

    model: DraftModel
    config: EngineConfig
    mesh: Mesh

    @property
    def params(self) -> dict:
        return self.model.params

    @cached_property
    def abstract(self) -> dict:
        return abstract_params(self.model.spec, self._dtype, self.mesh, scheme_in(self.params))

    @cached_property
    def kept(self) -> Any:
        """Pages of each of its layers."""
        kernel = dispatch.IMPLEMENTATIONS[self.attention]
        return abstract_state(self.model.spec, self._pools(self.config), self.mesh, kernel).pages

    @cached_property
    def attention(self) -> str:
        """The model's implementation, if it can do this one too."""
        try:
            return choose_attention(self.model.spec, self.config, self.mesh, self._dtype)
        except KernelError as error:
            log.warning("attention %r is not the draft model's: %s", self.config.attention, error)
            return choose_attention(
                self.model.spec, replace(self.config, attention="auto"), self.mesh, self._dtype
            )

    @cached_property
    def _network(self) -> Network:
        chosen = self.model.spec, self.config, self.mesh, self._dtype, scheme_in(self.params)
        return Network(
            self.model.spec,
            self.mesh,
            dispatch.IMPLEMENTATIONS[self.attention],
            dispatch.GROUPED[choose_grouped_matmul(*chosen)],
            choose_quantized_matmul(*chosen),
            self.config.page_size,
            jnp.dtype(self.config.page_dtype),
        )

    @property
    def _dtype(self) -> jnp.dtype:
        return self.params["embed"].dtype

    def cache_bytes(self, config: EngineConfig) -> int:
        """Of its pages in a lane on one device, if the engine had this configuration."""
        kernel = dispatch.IMPLEMENTATIONS[self.attention]
        return cache_bytes(self.model.spec, self._pools(config), kernel, self.mesh.shape["tensor"])

    def _pools(self, config: EngineConfig) -> EngineConfig:
        """One pool, of the group that it shares the numbers of, for each group of its layers."""
        return replace(
            config, pools=(config.pools[config.full_group],) * len(self.model.spec.page_groups())
        )

    # ---- in a step

    def next(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A R"],
        place: Place,
    ) -> tuple[Any, Float[Array, "B V"]]:
        done = self._forward(params, state, ids, tokens, place, most=1)
        return done.pages, self._network.logits(
            self._network.place_weights(params["drafter"]), done.hidden
        )

    def read(self, params: dict, state: State, computed: Computed) -> Any:
        """Nothing: it has its own hidden states."""
        return state.drafter

    def catch_up(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A T"],
        place: Place,
    ) -> tuple[Any, Float[Array, "A T D"]]:
        done = self._forward(params, state, ids, tokens, place, most=None)
        return done.pages, done.hidden.reshape(*tokens.shape, -1)

    def _forward(
        self,
        params: dict,
        state: State,
        ids: jax.Array,
        tokens: jax.Array,
        place: Place,
        most: int | None,
    ) -> Forwarded:
        spec = self.model.spec
        table = take(state.rows.tables[self.config.full_group], ids)
        known = jnp.minimum(tokens, spec.vocab_size - 1)  # the model's table may be padded further
        weights = self._network.place_weights(params["drafter"])
        tables = (table,) * len(spec.page_groups())
        return self._network.forward(weights, state.drafter, tables, known, place, most)
