"""A model as the steps of an engine run it: its architecture on a mesh, and the kernels that were
chosen for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.engine.device.kernels.attention import attention_options
from jaxserve.engine.device.token_layout import Place, take
from jaxserve.models.decoder import Forwarded, forward, logits
from jaxserve.models.matmul_weight_only import bind_kernels
from jaxserve.models.moe import Experts
from jaxserve.models.quant import KernelBinding
from jaxserve.models.sharded_attention import Attend
from jaxserve.models.spec import ModelSpec
from pallas_kernels.grouped_matmul.api import GroupedMatmul
from pallas_kernels.paged_attention.api import PagedAttention, Pages, Ragged
from sharding.rules import DP_AXES


@dataclass(frozen=True)
class Network:
    """placed: weights with a kernel, by name. dtype: of pages."""

    spec: ModelSpec
    mesh: Mesh
    kernel: PagedAttention
    grouped: GroupedMatmul
    placed: Mapping[str, KernelBinding]
    page_size: int
    dtype: jnp.dtype

    def place_weights(self, params: dict) -> dict:
        """Parameters, inside a step: they know what multiplies them."""
        return bind_kernels(params, self.placed)

    def forward(
        self,
        params: dict,
        pages: tuple[Pages, ...],
        tables: tuple[Int[Array, "A R W"], ...],
        tokens: Int[Array, "A T"],
        place: Place,
        most: int | None,
    ) -> Forwarded:
        """All tokens of a step once through the layers. tables: of the chunks' rows, for each page
        group.

        most: tokens of a row at most, see Options.
        """
        attends = self._attends(pages, tables, place, most)
        experts = (
            Experts(place.live.reshape(-1), self.spec, self.mesh, self.grouped)
            if self.spec.mixture
            else None
        )
        return forward(
            params,
            self.spec,
            pages,
            tokens.reshape(-1),
            place.position.reshape(-1),
            attends,
            experts,
        )

    def _attends(
        self,
        pages: tuple[Pages, ...],
        tables: tuple[jax.Array, ...],
        place: Place,
        most: int | None,
    ) -> tuple[Attend, ...]:
        """One Attend per layer; layers of a page group share theirs."""
        by_layer: dict[int, Attend] = {}
        for group, table in zip(self.spec.page_groups(), tables, strict=True):
            index = place.position // self.page_size
            entry = jax.vmap(lambda t, chunk, i: t[chunk, i])(table, place.chunk, index)
            no_page = pages[group.layers[0]].k.shape[1]
            page, offset = jnp.where(place.live, entry, no_page), place.position % self.page_size
            ragged = Ragged(table, place.lengths, place.starts, place.split, page, offset)
            options = attention_options(
                self.spec, group, self.mesh, self.page_size, self.dtype, most
            )
            by_layer |= dict.fromkeys(group.layers, Attend(ragged, self.mesh, self.kernel, options))
        return tuple(by_layer[i] for i in range(self.spec.num_layers))

    def logits(self, params: dict, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Whole rows of the vocabulary on every shard: what samples reads all of it.

        Each shard's part first: without being told, XLA:TPU gathered the head's weight instead of
        the logits.
        """
        values = logits(params, self.spec, hidden)
        for axes in ((DP_AXES, "tensor"), (DP_AXES, None)):
            values = lax.with_sharding_constraint(
                values, NamedSharding(self.mesh, PartitionSpec(*axes))
            )
        return values


def by_lane[T](mesh: Mesh, function: Callable[..., T]) -> Callable[..., T]:
    """For arrays whose first axis goes over lanes: left alone, XLA lets them exchange all of their
    logits.
    """
    lanes = PartitionSpec(DP_AXES)
    return jax.shard_map(function, mesh=mesh, in_specs=lanes, out_specs=lanes, check_vma=False)


def rows_of(
    tables: tuple[Int[Array, "A R W"], ...], ids: Int[Array, "A r"]
) -> tuple[Int[Array, "A r W"], ...]:
    """The page tables of these rows."""
    return tuple(take(table, ids) for table in tables)
