"""What the Hopper kernel works on: references to global and to shared memory, and a unit of
work."""

from typing import Any, NamedTuple

from pallas_kernels.paged_attention.gpu_work import Units

Scalar = Any  # an int32, of the program or known before it


class Inputs(NamedTuple):
    """In global memory."""

    units: Units  # of refs
    tables: Any  # [R, W]
    q: Any  # [n, K, M, H]
    k: Any  # [P, K, Z, H]
    v: Any = None  # latent pages have none
    k_scale: Any = None  # [P, K, Z], of 8-bit pages
    v_scale: Any = None


class Outputs(NamedTuple):
    """In global memory: of every unit, a softmax of its own."""

    out: Any  # [n*S, K, M, H]
    lse: Any  # [n*S, K, M]


class Shared(NamedTuple):
    """In shared memory. w warpgroups, s stages of B tokens."""

    q: Any  # [w * 64, H]
    k: Any  # [s, B, H]
    v: Any  # [s, B, H]; of latent pages k, whose first numbers are the value
    lse: Any  # [w * 64]
    q_full: Any
    q_free: Any
    k_full: Any  # these [s]
    k_free: Any
    v_full: Any
    v_free: Any
    cleared: Any
    scored: Any  # of latent pages
    raw: "Raw | None" = None
    out: Any = None  # [w * 64, columns] float32 of parts; whole results lie where the queries were
    weights: Any = None  # [w, 64, B]: only where the interpreter runs this


class Raw(NamedTuple):
    """8-bit pages as they came, in shared memory."""

    k: Any  # [s, B, H]
    v: Any
    k_scale: Any  # [s, B]
    v_scale: Any
    k_landed: Any  # [s]
    v_landed: Any


class Unit(NamedTuple):
    """Of `Units`, for one kv head."""

    row: Scalar
    first: Scalar
    count: Scalar
    begin: Scalar
    end: Scalar
    place: Scalar
    head: Scalar
    number: Scalar  # among this thread block's
    done: Scalar  # blocks of those before
    blocks: Scalar
