"""Attention over pages on a mesh: the only caller of attention kernels and their page writes."""

from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.pallas_kernels.paged_attention.api import (
    Layout,
    Options,
    PagedAttention,
    Pages,
    Ragged,
)
from jaxserve.sharding.rules import DP_AXES, RULES, Rules, partition


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """Factors of queries and keys at their positions.

    Cosines and sines rotate the first 2 n dimensions of every head.
    """

    cos: Float[Array, "T n"]
    sin: Float[Array, "T n"]
    growth: Float[Array, "T"] | None = None  # further factor of queries (spec.query_growth)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attend:
    """The attention of a step: called with a layer's queries, keys, values and pages.

    All fields except `ragged` are fixed in a compiled step.
    """

    ragged: Ragged  # rows and tables of all lanes, every field with a leading axis A
    mesh: Mesh = field(metadata={"static": True})
    kernel: PagedAttention = field(metadata={"static": True})
    options: Options = field(metadata={"static": True})  # for one shard's heads

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"] | None,
        pages: Pages,
        sinks: Float[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "T N V"], Pages]:
        """Write k and v into the pages, then attend to all tokens that the row has there.

        T counts the tokens of all lanes, lane after lane; arrays of pages have a leading axis A. v
        is None for latent pages, whose one key head every shard has. `sinks` are as in
        PagedAttention.
        """
        heads = PartitionSpec(DP_AXES, "tensor")
        lanes = PartitionSpec(DP_AXES)
        keys = lanes if v is None else heads
        paged = page_partition(self.kernel, self.options.layout, pages, self.mesh)
        return jax.shard_map(
            self._one_lane,
            mesh=self.mesh,
            in_specs=(heads, keys, keys, paged, lanes, PartitionSpec("tensor")),
            out_specs=(heads, paged),
            check_vma=False,
        )(q, k, v, pages, self.ragged, sinks)

    def _one_lane(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        pages: Pages,
        ragged: Ragged,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, Pages]:
        """Attend for one lane's tokens and one shard's heads, inside shard_map.

        The leading axis A has length 1 here.
        """
        pages, ragged = jax.tree.map(lambda x: x[0], (pages, ragged))
        out, pages, _ = self.kernel.attend(q, k, v, pages, ragged, self.options, sinks)
        return out, jax.tree.map(lambda x: x[None], pages)


def page_partition(kernel: PagedAttention, layout: Layout, pages: Pages, mesh: Mesh) -> Pages:
    """Return the PartitionSpec of each array of a layer's pages, which have a leading axis A.

    Args:
        layout: Layout of one shard's heads.
    """
    axes = kernel.axes(layout)
    rules = page_rules(layout)
    return jax.tree.map(
        lambda x, letters: partition("A" + letters, x.shape, mesh, rules), pages, axes
    )


def page_rules(layout: Layout) -> Rules:
    """Return the rules that split pages over the mesh.

    Pages of K alone are split by lanes alone: what they hold serves the queries of every shard.
    """
    return RULES if layout.keeps_values else {"A": DP_AXES}
