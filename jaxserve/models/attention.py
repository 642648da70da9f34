"""Self-attention over pages: projections, rotation, and the one place where kernels and page writes are called."""

import flax.struct
import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.models.layers import project, rms_norm
from jaxserve.models.rope import rotate
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.api import Options, PagedAttention, Pages, Ragged
from sharding.rules import LANES, partition


@flax.struct.dataclass
class Rotation:
    """Of the first 2 n dimensions of every head; the others stay as they are."""

    cos: Float[Array, "T n"]
    sin: Float[Array, "T n"]


@flax.struct.dataclass
class Attend:
    """What attention needs beside weights and activations: fixed for a compiled step, but for `ragged`."""

    ragged: Ragged  # every field with a leading axis A
    mesh: Mesh = flax.struct.field(pytree_node=False)
    kernel: PagedAttention = flax.struct.field(pytree_node=False)
    options: Options = flax.struct.field(pytree_node=False)  # of one shard's heads

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages
    ) -> tuple[Float[Array, "T N H"], Pages]:
        """Write k and v into the pages, then attend to everything the row has there.

        T counts the tokens of all lanes, lane after lane; arrays of pages have a leading axis A.
        """
        heads, lanes = PartitionSpec(LANES, "tensor"), PartitionSpec(LANES)
        axes = self.kernel.axes(self.options.layout)
        paged = jax.tree.map(lambda x, letters: partition("A" + letters, x.shape, self.mesh), pages, axes)
        return jax.shard_map(
            self._one_lane,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, paged, lanes),
            out_specs=(heads, paged),
            check_vma=False,
        )(q, k, v, pages, self.ragged)

    def _one_lane(
        self, q: jax.Array, k: jax.Array, v: jax.Array, pages: Pages, ragged: Ragged
    ) -> tuple[jax.Array, Pages]:
        """The same for one lane's tokens and one shard's heads; every lane axis has length 1 here."""
        pages, ragged = jax.tree.map(lambda x: x[0], (pages, ragged))
        out, pages, _ = self.kernel.attend(q, k, v, pages, ragged, self.options)
        return out, jax.tree.map(lambda x: x[None], pages)


def self_attention(
    spec: ModelSpec, weights: dict, x: Float[Array, "T D"], rotation: Rotation, attend: Attend, pages: Pages
) -> tuple[Float[Array, "T D"], Pages]:
    heads = project("TD,DKQH->TKQH", x, weights, "qkv").astype(x.dtype)  # of a kv head: its queries, its key, its value
    # Left free, XLA:TPU may turn the product over to suit the rotation, and copies the weight for it.
    heads = with_layout_constraint(heads, Layout((0, 1, 2, 3)))
    q, k, v = heads[:, :, :-2].reshape(len(x), -1, spec.head_dim), heads[:, :, -2], heads[:, :, -1]
    if spec.qk_norm != "none":
        q, k = norm(spec, q, weights["q_norm"]), norm(spec, k, weights["k_norm"])
    q, k = rotate(q, rotation.cos, rotation.sin), rotate(k, rotation.cos, rotation.sin)
    out, pages = attend(q, k, v, pages)
    # Heads flattened: contracting N and H as two dimensions makes XLA copy the weight in another order, every step.
    flat = weights | {"o": weights["o"].reshape(-1, spec.d_model)}
    return project("TM,MD->TD", out.reshape(len(out), -1), flat, "o").astype(x.dtype), pages


def norm(spec: ModelSpec, x: Float[Array, "T *N"], weight: Float[Array, "*N"]) -> Float[Array, "T *N"]:
    """The architecture's kind of RMS norm."""
    return rms_norm(x, weight, spec.norm_eps, spec.norm_plus_one, spec.norm_rounds_last)
