"""References that the Hopper kernel works on, in global and shared memory, and its unit of work."""

from typing import Any, NamedTuple

from jaxserve.pallas_kernels.paged_attention.gpu_work import Units

Scalar = Any  # an int32: a value of the kernel, or a constant


class Inputs(NamedTuple):
    """Operands in global memory."""

    units: Units  # its fields are references
    tables: Any  # [R, W]
    q: Any  # [n, K, M, H]
    k: Any  # [P, K, Z, H]
    v: Any = None  # latent pages have none
    k_scale: Any = None  # [P, K, Z], of 8-bit pages
    v_scale: Any = None


class Outputs(NamedTuple):
    """Results in global memory: a softmax of its own for every unit."""

    out: Any  # [n*S, K, M, H]
    lse: Any  # [n*S, K, M]


class Shared(NamedTuple):
    """Buffers and barriers in shared memory; w warpgroups, s stages of B tokens."""

    q: Any  # [w * 64, H]
    k: Any  # [s, B, H]
    v: Any  # [s, B, H]; of latent pages k, whose first numbers are the value
    lse: Any  # [w * 64]
    # Barriers. "full": copies into the buffer have landed; "free": it may be overwritten.
    q_full: Any
    q_free: Any
    k_full: Any  # [s], as those that follow
    k_free: Any
    v_full: Any
    v_free: Any
    cleared: Any  # values that no query sees have been zeroed
    scored: Any  # latent pages only: all warpgroups have read the block as keys
    raw: "Raw | None" = None
    # [w * 64, columns] float32: results of parts. Whole results are staged where the queries were.
    out: Any = None
    weights: Any = None  # [w, 64, B], in the interpreter only


class Raw(NamedTuple):
    """8-bit pages as they were copied, in shared memory."""

    k: Any  # [s, B, H]
    v: Any
    k_scale: Any  # [s, B]
    v_scale: Any
    k_landed: Any  # [s]
    v_landed: Any


class Unit(NamedTuple):
    """One entry of `Units`, for one kv head."""

    row: Scalar
    first: Scalar
    count: Scalar
    begin: Scalar
    end: Scalar
    place: Scalar
    head: Scalar  # as walked
    number: Scalar  # among the units of this thread block
    done: Scalar  # blocks of this thread block's units before
    blocks: Scalar  # blocks of this unit
