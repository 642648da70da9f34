"""Roofline of a step: the least that it must read and compute, and the time for that.

The numbers are counted from the architecture, because XLA's cost analysis leaves custom calls out.
A floor is a bound, no forecast: activations, collectives, launches and everything that does not
overlap come on top.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.engine.device.memory import slot_bytes
from jaxserve.engine.plan import StepKind
from jaxserve.models.decoder import param_specs
from jaxserve.models.layer_kind import ConvState, PageGroup
from jaxserve.models.moe_sizes import all_to_all_capacity
from jaxserve.models.quant import QuantScheme
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.references import STATE_PASSES, Chunk, References, attention_bytes
from jaxserve.plan.topology import Limits
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import ParamSpec, is_param_spec
from jaxserve.sharding.rules import RULES

LOGIT_BYTES = 4
REFERENCE = "reference"  # name of the implementation of every kernel in plain XLA
PAGE = 64  # tokens; any size will do, because only bytes per token are counted


@dataclass(frozen=True)
class Case:
    """One step of a lane."""

    kind: StepKind
    rows: int  # sequences
    context: int  # positions of each sequence before the step
    tokens: int  # tokens that the step computes, of all rows
    steps: int = 1  # steps in one launch


def together(case: Case, *beside: Case) -> Case:
    """Return one step with the rows and tokens of all cases, without their context."""
    cases = (case, *beside)
    return Case(case.kind, sum(each.rows for each in cases), 0, sum(each.tokens for each in cases))


class Work(NamedTuple):
    """Least work of one device in a step."""

    bytes: float  # read from memory, and those that parts without a kernel move beside
    flops: float  # FLOP of the products
    int8: float = 0  # part of `flops` that multiplies two int8 numbers
    fp8: float = 0  # part of `flops` that multiplies two fp8 numbers

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    def floor(self, limits: Limits) -> float:
        """Return the least seconds: for reading or for multiplying, whichever is longer."""
        return max(self.bytes / limits.bandwidth, self.multiplying(limits))

    def multiplying(self, limits: Limits) -> float:
        """Return the least seconds for the products."""
        narrow = [(self.int8, limits.int8), (self.fp8, limits.fp8)]
        wide = self.flops - self.int8 - self.fp8
        return wide / limits.flops + sum(flops / peak for flops, peak in narrow if flops)


class Kernels(NamedTuple):
    """Implementations of the products that a step is lowered with."""

    grouped: str  # implementation of products with experts
    quantized: frozenset[str]  # parameters with int4 in groups that a kernel multiplies
    platform: str  # of the devices

    def copies(self, weight: "Weight") -> bool:
        """Return whether the product works on a copy of the weight, in the activations' dtype.

        Off a TPU, where the compiler multiplies numbers as they are read, the references do: that
        of experts takes every expert's weight out of all of them, that of int4 in groups
        dequantizes.
        """
        if self.platform == "tpu" or weight.name == "scales":
            return False
        if weight.spec.axes.startswith("E"):
            return self.grouped == REFERENCE
        return bool(weight.spec.summed) and weight.parameter not in self.quantized


class Weight(NamedTuple):
    """A weight as it is stored."""

    name: str  # the parameter's, or "values" or "scales" of a quantized one
    part: str  # of the model: embed, layers, norm or head
    spec: ParamSpec
    parameter: str  # name of the parameter, also where it is quantized


def work_of(
    spec: ModelSpec,
    dtype: jnp.dtype,
    case: Case,
    mesh: MeshSpec | None = None,
    scheme: QuantScheme | None = None,
    pages: jnp.dtype | None = None,
) -> Work:
    """Return the work of one step on one device, where all lanes do the same.

    Every weight is read once: of the embedding only the rows of the tokens, unless it is the head
    too; of experts those that the tokens are expected to hit. Every live page is read once. A
    launch of several steps does the work for each. `spec` is as the devices of the mesh hold it;
    `dtype` is that of weights, and of pages unless `pages` is given.
    """
    weights = work_of_weights(spec, dtype, case, mesh, scheme)
    return total([weights, work_of_attention(spec, pages or dtype, case, mesh)])


def total(parts: Iterable[Work]) -> Work:
    """Return the sum of works."""
    return Work(*map(sum, zip(*parts, strict=True)))


def work_of_weights(
    spec: ModelSpec,
    dtype: jnp.dtype,
    case: Case,
    mesh: MeshSpec | None = None,
    scheme: QuantScheme | None = None,
    kernels: Kernels | None = None,
) -> Work:
    """Return the part of work_of that depends on rows and tokens, and not on their context.

    A copy of a weight that one of `kernels` works on is written and read once more; with None,
    every weight is read as it is stored.
    """
    parts: list[tuple[Weight, Work]] = []
    for weight in weights_of(spec, dtype, scheme):
        work = _of_weight(weight, spec, case, mesh or MeshSpec())
        if kernels and kernels.copies(weight):
            wide = jnp.dtype(dtype).itemsize * 8 / jax.dtypes.itemsize_bits(weight.spec.dtype)
            work = work._replace(bytes=work.bytes * (1 + 2 * wide))
        parts.append((weight, work))
    whole = total(part for _, part in parts)
    if scheme is None or not scheme.activations:
        return whole
    narrow = sum(part.flops for weight, part in parts if weight.name == "values")
    return whole._replace(**{scheme.numbers: narrow})


def work_of_attention(
    spec: ModelSpec,
    pages: jnp.dtype,
    case: Case,
    mesh: MeshSpec | None = None,
    references: References | None = None,
) -> Work:
    """Return the part of work_of that depends on rows and their context.

    That is reading pages, attention, and states that are read and written; of what `references`
    run, the bytes are those that they move.
    """
    tensor = (mesh or MeshSpec()).tensor
    by = references or References()
    parts = [_of_attention(group, spec, pages, case, tensor, by) for group in spec.page_groups()]
    return total([*parts, _of_states(spec, case, tensor, by)])


def sent_of(spec: ModelSpec, dtype: jnp.dtype, case: Case, mesh: MeshSpec | None = None) -> float:
    """Return the bytes that one device sends in a step, in rings.

    Tensor parallelism sums [T, D] after attention, after the MLP and for the embedding, and gathers
    the logits. Devices that share experts send each other the tokens of their lanes, and send the
    results back.
    """
    mesh = mesh or MeshSpec()
    hidden = case.tokens * spec.d_model * jnp.dtype(dtype).itemsize
    sampled = case.tokens if case.kind == "score" else case.rows
    ring = (mesh.tensor - 1) / mesh.tensor
    logits = sampled * spec.vocab_size * LOGIT_BYTES
    # A sum goes around the ring twice: to be added up, and to be handed out.
    sums = (2 * spec.num_layers + 1) * 2 * hidden * ring + logits * ring
    if spec.mixture is None:
        return sums
    per_neighbour = all_to_all_capacity(spec.mixture, case.tokens, mesh.expert) or case.tokens
    share = per_neighbour / case.tokens
    return sums + len(spec.mixture.layers) * 2 * hidden * share * (mesh.expert - 1)


def weights_of(
    spec: ModelSpec, dtype: jnp.dtype, scheme: QuantScheme | None = None
) -> Iterator[Weight]:
    """Yield all weights of a model."""
    specs = param_specs(spec, dtype, scheme)
    for path, leaf in jax.tree.leaves_with_path(specs, is_leaf=is_param_spec):
        *_, parameter = (key.key for key in path if hasattr(key, "key"))
        yield Weight(getattr(path[-1], "name", parameter), path[0].key, leaf, parameter)


def _of_weight(weight: Weight, spec: ModelSpec, case: Case, mesh: MeshSpec) -> Work:
    name, part, param, _ = weight
    share = 1 / _shards(param, mesh)
    size = param.nbytes * share
    elements = math.prod(param.shape) * share
    sampled = case.tokens if case.kind == "score" else case.rows
    if part == "embed" and not spec.tied_head:
        return Work(size * min(case.tokens / spec.vocab_size, 1), 0)
    if name.endswith(("norm", "bias", "scales")):  # added or multiplied, not a product
        return Work(size * _hit(param, spec, case, mesh), 0)
    if part in ("embed", "head"):
        return Work(size, 2 * sampled * elements)
    flops = 2 * case.tokens * elements * _used(param, spec, mesh)
    return Work(size * _hit(param, spec, case, mesh), flops)


def _shards(param: ParamSpec, mesh: MeshSpec) -> int:
    return math.prod(getattr(mesh, axis) for letter in param.axes for axis in RULES.get(letter, ()))


def _hit(param: ParamSpec, spec: ModelSpec, case: Case, mesh: MeshSpec) -> float:
    """Return the share of a weight that the step has to read.

    Of E experts, E (1 - (1 - X/E)^T) are expected to be hit by T tokens, those of all lanes that
    share the experts, if each token chooses its X experts at random. Choices that agree hit fewer.
    """
    if not param.axes.startswith("E"):
        return 1
    return 1 - (1 - _chosen(spec)) ** (case.tokens * mesh.expert)


def _used(param: ParamSpec, spec: ModelSpec, mesh: MeshSpec) -> float:
    """Return how often a token of this lane is multiplied with the weight's shard.

    With X of E experts. The other lanes that share the experts send their tokens there as well.
    """
    return _chosen(spec) * mesh.expert if param.axes.startswith("E") else 1


def _chosen(spec: ModelSpec) -> float:
    return spec.mixture.taken / spec.mixture.experts if spec.mixture else 1


def _of_attention(
    group: PageGroup,
    spec: ModelSpec,
    dtype: jnp.dtype,
    case: Case,
    tensor: int,
    references: References,
) -> Work:
    layout = group.layout(PAGE, dtype, shards=tensor)
    per_row = case.tokens // case.rows
    # Positions that the first and the last query see.
    first = case.context + 1
    last = case.context + per_row
    seen = _sum_up_to(last, group.window) - _sum_up_to(first - 1, group.window)
    live = last if group.window is None else min(last, group.window + per_row - 1)
    rows = len(group.layers) * case.rows
    heads = spec.num_heads // tensor
    flops = rows * seen * 2 * heads * (layout.head_dim + layout.out_dim)
    if references.queries is None or not layout.out_dim:  # pages without values: nobody attends
        return Work(rows * live * layout.token_bytes, flops)
    chunk = Chunk(case.kind, case.context, per_row)
    return Work(rows * attention_bytes(references, layout, heads, chunk, group.window), flops)


def _of_states(spec: ModelSpec, case: Case, tensor: int, references: References) -> Work:
    """Return the work on states: each row's are read and written once in a step by a kernel."""
    if spec.state is None:
        return Work(0, 0)
    sizes = spec.state.sizes()
    if isinstance(spec.state, ConvState):
        operations = 2 * math.prod(sizes[letter] for letter in "tkf")
    else:
        # A token decays a number, adds its change, and multiplies it for the key and for the query.
        operations = 7 * math.prod(sizes[letter] for letter in "krdv")
    flops = case.tokens * operations * len(spec.state_layers) // tensor
    # The reference walks over prompts block by block, which is not counted: as a kernel does.
    passes = STATE_PASSES if references.states and case.kind == "decode" else 1
    return Work(case.rows * passes * 2 * slot_bytes(spec) / tensor, flops)


def _sum_up_to(end: int, window: int | None) -> int:
    """Return min(1, window) + min(2, window) + ... + min(end, window)."""
    if window is None or end <= window:
        return end * (end + 1) // 2
    return window * (window + 1) // 2 + (end - window) * window
