"""Attention over keys and values in pages by a kernel for a CPU, in steps that jax compiles."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.cpu_kernels.library import attention_target, check_instructions

# Numbers that pages may have, by those of the queries.
PAGES: Final = {
    "bfloat16": ("bfloat16", "int8", "float8_e4m3fn"),
    "float32": ("float32", "bfloat16", "int8", "float8_e4m3fn"),
}


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "P K Z H"] | Int[Array, "P K Z H"],
    v: Float[Array, "P K Z H"] | Int[Array, "P K Z H"] | None,
    scales: tuple[Float[Array, "P K Z"], Float[Array, "P K Z"]] | None,
    tables: Int[Array, "R W"],
    lengths: Int[Array, "R"],
    starts: Int[Array, "R+1"],
    sinks: Float[Array, "N"],
    *,
    out_dim: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    instructions: str,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Return the causal attention of every query to its row, and its log-sum-exp; both float32.

    Of finite keys and values a query's result depends neither on other queries nor on which thread
    computes it. Letters,
    arguments and what may lie where no query looks are as in paged_attention.api; lengths count
    the step's tokens, whose keys and values are in the pages already.

    Args:
        q: Numbers of a dtype in PAGES, which has the pages' dtypes for each. An even number H of
            bfloat16.
        k: Keys; those of float8_e4m3fn as their bits, uint8.
        v: Values; None where they are the first V numbers of the keys.
        scales: float32 scales of keys and values in 8-bit pages; None elsewhere.
        sinks: Score of each head's sink; a large negative number for none.
        out_dim: V.
        instructions: One of library.supported().
    """
    check_instructions(instructions)
    nothing = jnp.zeros(0, jnp.float32)
    k_scale, v_scale = scales or (nothing, nothing)
    result = (
        jax.ShapeDtypeStruct((*q.shape[:2], out_dim), jnp.float32),
        jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
    )
    call = jax.ffi.ffi_call(attention_target(instructions), result)
    out, lse = call(
        q,
        k,
        k if v is None else v,
        k_scale,
        v_scale,
        tables,
        lengths,
        starts,
        sinks,
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0),
        window=np.int64(window or 0),
    )
    return out, lse
