"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024), absorbed: attention over the
compressed vectors.

A query's part that is not rotated goes through the matrix that would have made its head's keys, and
the attention's result through the one that would have made the values; so pages hold one vector per
token, whatever the heads.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.models.layers import einsum, flatten, project, rms_norm
from jaxserve.models.rope import rotate
from jaxserve.models.sharded_attention import Attend, Rotation
from jaxserve.models.spec import Latent
from pallas_kernels.paged_attention.api import Pages

EPS = 1e-6  # of the norms of compressed vectors, whatever config.json says of the others


def axes(latent: Latent) -> dict[str, str]:
    """Name -> axes of the parameters."""
    found = {"compress": "Dc", "latent_norm": "m", "key_up": "Num", "value_up": "Nmw", "o": "NwD"}
    return found | ({"query": "NHy", "query_norm": "y"} if latent.query_rank else {"query": "NHD"})


def latent_attention(
    latent: Latent,
    weights: dict,
    x: Float[Array, "T D"],
    rotation: Rotation,
    attend: Attend,
    pages: Pages,
) -> tuple[Float[Array, "T D"], Pages]:
    y, m, dtype = latent.query_rank or 0, latent.rank, x.dtype
    compressed = project("TD,Dc->Tc", x, weights, "compress").astype(dtype)
    narrow = rms_norm(compressed[:, :y], weights["query_norm"], EPS) if y else x
    # Rows of a head's 192 numbers would not fill a TPU's tiles: so they are columns.
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
    """Every head's own product. It is rounded before the tokens come first again: XLA:CPU makes a
    turn that follows a product a part of it, and cannot run such a product of bfloat16 with float32
    sums.
    """
    return einsum(subscripts, x, weight).astype(x.dtype).swapaxes(0, 1)
