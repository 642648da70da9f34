"""Self-attention over pages: projections, rotation, and the one place where kernels and page writes are called."""

from types import ModuleType

import flax.struct
import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.models.layers import einsum, rms_norm
from jaxserve.models.rope import rotate
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.reference import Pages


@flax.struct.dataclass
class Ragged:
    """Where the tokens of a step lie, for one page group. A leading axis A counts lanes.

    With a window, table entries of pages that lie before what any query sees may name any page.
    """

    tables: Int[Array, "A R W"]  # page of every page-sized stretch of a row
    lengths: Int[Array, "A R"]  # kv positions of the row once this step's tokens are written; 0 for an empty row
    starts: Int[Array, "A R+1"]  # row r's tokens are starts[r]:starts[r+1]
    page: Int[Array, "A T"]  # page that token t is written to; P (out of range) for padding
    offset: Int[Array, "A T"]


@flax.struct.dataclass
class Rotation:
    """Of the first 2 n dimensions of every head; the others stay as they are."""

    cos: Float[Array, "T n"]
    sin: Float[Array, "T n"]


@flax.struct.dataclass
class Attend:
    """What attention needs beside weights and activations: fixed for a compiled step, but for `ragged`."""

    ragged: Ragged
    mesh: Mesh = flax.struct.field(pytree_node=False)
    kernel: ModuleType = flax.struct.field(pytree_node=False)
    decode: bool = flax.struct.field(pytree_node=False)  # one token per row: T = R
    scale: float = flax.struct.field(pytree_node=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    softcap: float | None = flax.struct.field(pytree_node=False, default=None)

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages
    ) -> tuple[Float[Array, "T N H"], Pages]:
        """Write k and v into the pages, then attend to everything the row has there.

        T counts the tokens of all lanes, lane after lane; pages are [A, P, K, Z, H].
        """
        heads, lanes, paged = (
            PartitionSpec("data", "tensor"),
            PartitionSpec("data"),
            PartitionSpec("data", None, "tensor"),
        )
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
        pages = self.kernel.write(pages, k, v, ragged.page, ragged.offset)
        knobs = dict(scale=self.scale, window=self.window, softcap=self.softcap)
        if self.decode:
            out = self.kernel.decode(q, pages, ragged.tables, ragged.lengths, **knobs)
        else:
            out = self.kernel.prefill(q, pages, ragged.tables, ragged.lengths, ragged.starts, **knobs)
        return out.astype(q.dtype), jax.tree.map(lambda x: x[None], pages)


def self_attention(
    spec: ModelSpec, weights: dict, x: Float[Array, "T D"], rotation: Rotation, attend: Attend, pages: Pages
) -> tuple[Float[Array, "T D"], Pages]:
    q = _project("TD,DNH->TNH", x, weights, "q")
    k = _project("TD,DKH->TKH", x, weights, "k")
    v = _project("TD,DKH->TKH", x, weights, "v")
    if spec.qk_norm != "none":
        q, k = norm(spec, q, weights["q_norm"]), norm(spec, k, weights["k_norm"])
    q, k = rotate(q, rotation.cos, rotation.sin), rotate(k, rotation.cos, rotation.sin)
    out, pages = attend(q, k, v, pages)
    # Heads flattened: contracting N and H as two dimensions makes XLA copy the weight in another order, every step.
    flat = weights | {"o": weights["o"].reshape(-1, spec.d_model)}
    return _project("TM,MD->TD", out.reshape(len(out), -1), flat, "o"), pages


def norm(spec: ModelSpec, x: Float[Array, "T *N"], weight: Float[Array, "*N"]) -> Float[Array, "T *N"]:
    """The architecture's kind of RMS norm."""
    return rms_norm(x, weight, spec.norm_eps, spec.norm_plus_one, spec.norm_rounds_last)


def _project(subscripts: str, x: jax.Array, weights: dict, name: str) -> jax.Array:
    y = einsum(subscripts, x, weights[name])
    if f"{name}_bias" in weights:
        y = y + weights[f"{name}_bias"].astype(y.dtype)[None]
    return y.astype(x.dtype)
