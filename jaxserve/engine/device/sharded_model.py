"""A model as an engine's steps run it: its architecture on a mesh, with the chosen kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.engine.device.kernels.choice import attention_options
from jaxserve.engine.device.lane_index import take
from jaxserve.engine.device.token_layout import TokenLayout
from jaxserve.models.decoder import Forwarded, Kept, Mixer, forward, logits
from jaxserve.models.matmul_weight_only import bind_kernels
from jaxserve.models.moe import Experts
from jaxserve.models.quant import KernelBinding
from jaxserve.models.sharded_attention import Attend
from jaxserve.models.sharded_state import Recurrence, StateRows
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.gated_delta.api import GatedDelta
from jaxserve.pallas_kernels.grouped_matmul.api import GroupedMatmul
from jaxserve.pallas_kernels.paged_attention.api import PagedAttention, Pages, Ragged
from jaxserve.sharding.rules import DP_AXES


@dataclass(frozen=True)
class ShardedModel:
    """A model specification with a mesh and kernels, ready to be traced in a step."""

    spec: ModelSpec
    mesh: Mesh
    attention: PagedAttention
    grouped_matmul: GroupedMatmul
    # Weights that a kernel multiplies, by name; XLA multiplies the others.
    kernel_weights: Mapping[str, KernelBinding]
    gated_delta: GatedDelta
    page_size: int
    page_dtype: jnp.dtype

    def bind_kernels(self, params: dict) -> dict:
        """Return the parameters, inside a step, with each weight bound to the kernel it has."""
        return bind_kernels(params, self.kernel_weights)

    def forward(
        self,
        params: dict,
        kept: tuple[Kept, ...],
        tables: tuple[Int[Array, "A R W"], ...],
        tokens: Int[Array, "A T"],
        layout: TokenLayout,
        max_row_tokens: int | None,
        verifies: bool = False,
    ) -> Forwarded:
        """Run all tokens of a step through the layers once.

        `max_row_tokens` is as in attention_options.

        Args:
            kept: Pages or states of each layer.
            tables: Tables of the chunks' rows, for each group.
            verifies: Whether tokens may be rejected behind the step, see Forwarded.
        """
        mixers = self._mixers(kept, tables, layout, max_row_tokens, verifies)
        experts = None
        if self.spec.mixture:
            experts = Experts(layout.live.reshape(-1), self.spec, self.mesh, self.grouped_matmul)
        position = layout.position.reshape(-1)
        return forward(params, self.spec, kept, tokens.reshape(-1), position, mixers, experts)

    def _mixers(
        self,
        kept: tuple[Kept, ...],
        tables: tuple[jax.Array, ...],
        layout: TokenLayout,
        max_row_tokens: int | None,
        verifies: bool,
    ) -> tuple[Mixer, ...]:
        """Make the attention or the recurrence of each layer; layers of a group share theirs."""
        by_layer: dict[int, Mixer] = {}
        groups = self.spec.page_groups()
        if self.spec.state:  # its table comes behind those of pages
            rows = _state_rows(tables[-1], layout)
            recurrence = Recurrence(
                rows, self.page_size, self.mesh, self.gated_delta, max_row_tokens, verifies
            )
            by_layer |= dict.fromkeys(self.spec.state_layers, recurrence)
        for group, table in zip(groups, tables[: len(groups)], strict=True):
            index = layout.position // self.page_size
            entry = take(table, layout.chunk, index)
            # An id out of range, such as the number of pages, drops what padding would write.
            pages = kept[group.layers[0]]
            assert isinstance(pages, Pages)
            no_page = pages.k.shape[1]
            page = jnp.where(layout.live, entry, no_page)
            offset = layout.position % self.page_size
            ragged = Ragged(table, layout.lengths, layout.starts, layout.split, page, offset)
            options = attention_options(
                self.spec, group, self.mesh, self.page_size, self.page_dtype, max_row_tokens
            )
            attend = Attend(ragged, self.mesh, self.attention, options)
            by_layer |= dict.fromkeys(group.layers, attend)
        return tuple(by_layer[i] for i in range(self.spec.num_layers))

    def logits(self, params: dict, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Compute logits, with the whole vocabulary on every shard, as sampling needs it."""
        values = logits(params, self.spec, hidden)
        # Each shard's part first: without that constraint XLA:TPU gathered the head's weight
        # instead of the logits.
        for axes in ((DP_AXES, "tensor"), (DP_AXES, None)):
            sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
            values = lax.with_sharding_constraint(values, sharding)
        return values


def _state_rows(table: Int[Array, "A R W"], layout: TokenLayout) -> StateRows:
    """Return the rows of a step whose states lie in the slots of a table."""
    sizes = jnp.diff(layout.starts, axis=-1)
    begin = layout.lengths - sizes
    return StateRows(table, begin, layout.starts[:, :-1], sizes, layout.chunk, layout.live)


def by_lane[T](mesh: Mesh, function: Callable[..., T]) -> Callable[..., T]:
    """Run a function on each lane's part of its arrays, whose first axis goes over lanes.

    Left alone, XLA lets lanes exchange all of their logits.
    """
    lanes = PartitionSpec(DP_AXES)
    return jax.shard_map(function, mesh=mesh, in_specs=lanes, out_specs=lanes, check_vma=False)
