"""The least that a step has to read and to compute, counted from the architecture, and the time
that takes at least.

Counted, not asked of the compiler: XLA's cost analysis leaves custom calls out. A floor is a bound,
not a forecast: activations, collectives, launches and everything that does not overlap come on top.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.engine.plan import StepKind
from jaxserve.models.decoder import param_specs
from jaxserve.models.moe_sizes import all_to_all_capacity
from jaxserve.models.quant import QuantScheme
from jaxserve.models.spec import ModelSpec, PageGroup
from pallas_kernels.paged_attention.api import Layout
from sharding.mesh import MeshSpec
from sharding.params import ParamSpec, is_param_spec
from sharding.rules import RULES

SCALE_BYTES = 4  # of a token's K or V of one head, in pages of 8 bits
LOGIT_BYTES = 4
PAGE = 64  # any size: what a token takes is asked for


@dataclass(frozen=True)
class Limits:
    """Of one device. bandwidth: bytes/s of its memory. flops: FLOP/s of dense products.

    int8, fp8: those of products of two such numbers, 0 where it has none.
    """

    bandwidth: float
    flops: float
    int8: float = 0
    fp8: float = 0

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on a step is bound by arithmetic, if it multiplies nothing of 8
        bits.
        """
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Case:
    """One step of a lane. rows: sequences. context: positions of each before the step. tokens:
    computed by one step.

    steps: per launch.
    """

    kind: StepKind
    rows: int
    context: int
    tokens: int
    steps: int = 1


def together(case: Case, *beside: Case) -> Case:
    """All in one step, their context left out."""
    cases = (case, *beside)
    return Case(case.kind, sum(each.rows for each in cases), 0, sum(each.tokens for each in cases))


class Work(NamedTuple):
    """What one device cannot do without in a step: bytes read from memory, and FLOP of its
    products.

    int8, fp8: those of them that multiply two such numbers.
    """

    bytes: float
    flops: float
    int8: float = 0
    fp8: float = 0

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def floor(self, limits: Limits) -> float:
        """Seconds."""
        return max(self.bytes / limits.bandwidth, self.multiplying(limits))

    def multiplying(self, limits: Limits) -> float:
        """Seconds of the products."""
        narrow = [(self.int8, limits.int8), (self.fp8, limits.fp8)]
        wide = self.flops - self.int8 - self.fp8
        return wide / limits.flops + sum(flops / peak for flops, peak in narrow if flops)


class Weight(NamedTuple):
    name: str  # the parameter's own, or which half of a quantized one: values, scales
    part: str  # of the model: embed, layers, norm, head
    spec: ParamSpec


def work_of(
    spec: ModelSpec,
    dtype: jnp.dtype,
    case: Case,
    mesh: MeshSpec | None = None,
    form: QuantScheme | None = None,
    pages: jnp.dtype | None = None,
) -> Work:
    """Of one step (of several in a launch) on one device of the mesh, the lanes all doing this.

    Every weight once, of the embedding only the rows of the tokens, unless it is the head too, of
    experts those that the tokens are expected to hit; every live page once. dtype: of weights, and
    of pages unless `pages` is given. form: of quantized weights. spec: as these devices hold it.
    """
    mesh = mesh or MeshSpec()
    return total(
        [
            work_of_weights(spec, dtype, case, mesh, form),
            work_of_attention(spec, pages or dtype, case, mesh),
        ]
    )


def total(parts: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(*parts, strict=True)))


def work_of_weights(
    spec: ModelSpec,
    dtype: jnp.dtype,
    case: Case,
    mesh: MeshSpec | None = None,
    form: QuantScheme | None = None,
) -> Work:
    """The part of work_of that depends on the step's rows and tokens, not on their context."""
    parts = [
        (weight, _of_weight(weight, spec, case, mesh or MeshSpec()))
        for weight in weights_of(spec, dtype, form)
    ]
    whole = total(part for _, part in parts)
    if form is None or not form.activations:
        return whole
    return whole._replace(
        **{form.numbers: sum(part.flops for weight, part in parts if weight.name == "values")}
    )


def work_of_attention(
    spec: ModelSpec, pages: jnp.dtype, case: Case, mesh: MeshSpec | None = None
) -> Work:
    """The rest of it."""
    tensor = (mesh or MeshSpec()).tensor
    return total(_of_attention(group, spec, pages, case, tensor) for group in spec.page_groups())


def sent_of(spec: ModelSpec, dtype: jnp.dtype, case: Case, mesh: MeshSpec | None = None) -> float:
    """Bytes that one device sends in a step, in rings: beside the floor of its work, not in it.

    Tensor parallelism sums [T, D] after attention, after the MLP and for the embedding, and gathers
    the logits; experts on several devices are given the tokens of each other's lanes, and give back
    what they made of them.
    """
    mesh = mesh or MeshSpec()
    hidden = case.tokens * spec.d_model * jnp.dtype(dtype).itemsize
    sampled = case.tokens if case.kind == "score" else case.rows
    ring = (mesh.tensor - 1) / mesh.tensor
    sums = (
        2 * spec.num_layers + 1
    ) * 2 * hidden * ring + sampled * spec.vocab_size * LOGIT_BYTES * ring
    if spec.mixture is None:
        return sums
    share = (
        all_to_all_capacity(spec.mixture, case.tokens, mesh.expert) or case.tokens
    ) / case.tokens  # of tokens, for each neighbour
    return sums + len(spec.mixture.layers) * 2 * hidden * share * (mesh.expert - 1)


def weights_of(
    spec: ModelSpec, dtype: jnp.dtype, form: QuantScheme | None = None
) -> Iterator[Weight]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        param_specs(spec, dtype, form), is_leaf=is_param_spec
    )
    for path, leaf in leaves:
        yield Weight(getattr(path[-1], "key", None) or path[-1].name, path[0].key, leaf)


def _of_weight(weight: Weight, spec: ModelSpec, case: Case, mesh: MeshSpec) -> Work:
    name, part, param = weight
    share = 1 / _shards(param, mesh)
    size, elements = param.nbytes * share, math.prod(param.shape) * share
    sampled = case.tokens if case.kind == "score" else case.rows
    if part == "embed" and not spec.tied_head:
        return Work(size * min(case.tokens / spec.vocab_size, 1), 0)
    if name.endswith(("norm", "bias", "scales")):  # added or multiplied, not a product
        return Work(size * _hit(param, spec, case, mesh), 0)
    if part in ("embed", "head"):
        return Work(size, 2 * sampled * elements)
    return Work(
        size * _hit(param, spec, case, mesh), 2 * case.tokens * elements * _used(param, spec, mesh)
    )


def _shards(param: ParamSpec, mesh: MeshSpec) -> int:
    return math.prod(getattr(mesh, axis) for letter in param.axes for axis in RULES.get(letter, ()))


def _hit(param: ParamSpec, spec: ModelSpec, case: Case, mesh: MeshSpec) -> float:
    """The share of a weight that the step has to read: of experts, E (1 - (1 - X/E)^T) of E are
    expected to be hit.

    By tokens that choose their X at random, of all lanes that share the experts. Choices that agree
    hit fewer.
    """
    if not param.axes.startswith("E"):
        return 1
    return 1 - (1 - _chosen(spec)) ** (case.tokens * mesh.expert)


def _used(param: ParamSpec, spec: ModelSpec, mesh: MeshSpec) -> float:
    """Times that a token of this lane is multiplied with the weight's shard: of experts, with its X
    of E.

    The other lanes send theirs to the shard as well.
    """
    return _chosen(spec) * mesh.expert if param.axes.startswith("E") else 1


def _chosen(spec: ModelSpec) -> float:
    return spec.mixture.taken / spec.mixture.experts if spec.mixture else 1


def _of_attention(
    group: PageGroup, spec: ModelSpec, dtype: jnp.dtype, case: Case, tensor: int
) -> Work:
    layout = group.layout(PAGE, dtype, shards=tensor)
    per_row = case.tokens // case.rows
    first, last = (
        case.context + 1,
        case.context + per_row,
    )  # positions that the first and the last query see
    seen = _sum_up_to(last, group.window) - _sum_up_to(first - 1, group.window)
    live = last if group.window is None else min(last, group.window + per_row - 1)
    rows = len(group.layers) * case.rows
    heads = spec.num_heads // tensor
    return Work(
        rows * live * token_bytes(layout),
        rows * seen * 2 * heads * (layout.head_dim + layout.out_dim),
    )


def token_bytes(layout: Layout) -> int:
    """Of a token in one layer's pages: K and V of the layout's heads, or what is latent, and
    scales.
    """
    arrays = 1 if layout.value_dim is not None else 2
    return (
        arrays
        * layout.kv_heads
        * (layout.head_dim * layout.dtype.itemsize + SCALE_BYTES * layout.scaled)
    )


def _sum_up_to(end: int, window: int | None) -> int:
    """min(1, window) + min(2, window) + ... + min(end, window)."""
    if window is None or end <= window:
        return end * (end + 1) // 2
    return window * (window + 1) // 2 + (end - window) * window
