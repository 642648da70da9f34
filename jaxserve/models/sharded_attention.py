"""Attention over pages on a mesh: the one place where attention kernels and page writes are
called."""

import flax.struct
import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.api import Layout, Options, PagedAttention, Pages, Ragged
from sharding.rules import DP_AXES, RULES, Rules, partition


@flax.struct.dataclass
class Rotation:
    """Of the first 2 n dimensions of every head; the others stay as they are."""

    cos: Float[Array, "T n"]
    sin: Float[Array, "T n"]


@flax.struct.dataclass
class Attend:
    """What attention needs beside weights and activations: fixed for a compiled step, but for
    `ragged`.
    """

    ragged: Ragged  # every field with a leading axis A
    mesh: Mesh = flax.struct.field(pytree_node=False)
    kernel: PagedAttention = flax.struct.field(pytree_node=False)
    options: Options = flax.struct.field(pytree_node=False)  # of one shard's heads

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"] | None,
        pages: Pages,
        sinks: Float[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "T N V"], Pages]:
        """Write k and v into the pages, then attend to everything the row has there.

        T counts the tokens of all lanes, lane after lane; arrays of pages have a leading axis A. v
        is None for latent pages, whose one key head every shard has. sinks: see PagedAttention.
        """
        heads, lanes = PartitionSpec(DP_AXES, "tensor"), PartitionSpec(DP_AXES)
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
        """The same for one lane's tokens and one shard's heads; every lane axis has length 1
        here."""
        pages, ragged = jax.tree.map(lambda x: x[0], (pages, ragged))
        out, pages, _ = self.kernel.attend(q, k, v, pages, ragged, self.options, sinks)
        return out, jax.tree.map(lambda x: x[None], pages)


def page_partition(kernel: PagedAttention, layout: Layout, pages: Pages, mesh: Mesh) -> Pages:
    """The PartitionSpec of each of a layer's arrays, which have a leading axis A. layout: of one
    shard's heads.
    """
    axes, rules = kernel.axes(layout), page_rules(layout)
    return jax.tree.map(
        lambda x, letters: partition("A" + letters, x.shape, mesh, rules), pages, axes
    )


def page_rules(layout: Layout) -> Rules:
    """How pages are split: latent ones by lanes alone, since their one head serves the queries of
    every shard.
    """
    return RULES if layout.value_dim is None else {"A": DP_AXES}
