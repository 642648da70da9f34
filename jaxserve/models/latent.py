"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024) in its absorbed form.

Attention runs over compressed vectors. The part of a query that is not rotated is multiplied by the
matrix that would otherwise expand its head's keys, and the result of attention by the matrix that
would expand the values. Pages therefore hold one vector per token, whatever the number of heads.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.models.layer_kind import Latent
from jaxserve.models.layers import einsum, flatten, project, rms_norm
from jaxserve.models.rope import rotate
from jaxserve.models.sharded_attention import Attend, Rotation
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.paged_attention.api import Pages

EPS = 1e-6  # of the norms of compressed vectors; config.json gives that of the other norms


def axes(spec: ModelSpec, latent: Latent) -> dict[str, str]:
    """Return parameter name -> axes of a latent attention layer."""
    found = {"compress": "Dc", "latent_norm": "m", "key_up": "Num", "value_up": "Nmw", "o": "NwD"}
    if spec.qkv_bias:
        found |= {"compress_bias": "c"}
    if spec.out_bias:
        found |= {"o_bias": "D"}
    if latent.query_rank:
        return found | {"query": "NHy", "query_norm": "y"}
    return found | {"query": "NHD"}


def latent_attention(
    latent: Latent,
    weights: dict,
    x: Float[Array, "T D"],
    rotation: Rotation,
    attend: Attend,
    pages: Pages,
) -> tuple[Float[Array, "T D"], Pages]:
    """Return the layer's attention for its tokens, and the pages with their vectors."""
    y = latent.query_rank or 0
    m = latent.rank
    dtype = x.dtype
    compressed = project("TD,Dc->Tc", x, weights, "compress").astype(dtype)
    narrow = rms_norm(compressed[:, :y], weights["query_norm"], EPS) if y else x
    # Heads are flattened into columns: rows of a head's 192 numbers would not fill a TPU's tiles.
    query = einsum("Ty,My->TM", narrow, flatten(weights["query"])).astype(dtype)
    query = query.reshape(len(x), -1, latent.head + latent.rotated)
    absorbed = _head_by_head("TNu,Num->NTm", query[:, :, : latent.head], weights["key_up"])
    q = jnp.concatenate(
        [absorbed, rotate(query[:, :, latent.head :], rotation.cos, rotation.sin)], -1
    )
    vector = rms_norm(compressed[:, y : y + m], weights["latent_norm"], EPS)[:, None]
    k = jnp.concatenate(
        [vector, rotate(compressed[:, None, y + m :], rotation.cos, rotation.sin)], -1
    )
    out, pages = attend(q, k, None, pages)
    values = _head_by_head("TNm,Nmw->NTw", out, weights["value_up"])
    flat = weights | {"o": flatten(weights["o"])}
    return project("TM,MD->TD", values.reshape(len(x), -1), flat, "o").astype(dtype), pages


def _head_by_head(
    subscripts: str, x: Float[Array, "T N a"], weight: Float[Array, "N a b"]
) -> Float[Array, "T N b"]:
    """Multiply every head by its own matrix, and return tokens first again.

    The product is rounded before it is transposed: XLA:CPU fuses a transpose into the product
    before it, and cannot run the fused product of bfloat16 with float32 sums.
    """
    return einsum(subscripts, x, weight).astype(x.dtype).swapaxes(0, 1)
