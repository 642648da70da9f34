"""Mixture-of-experts MLPs: routing, the way of tokens to the shards that hold their experts and
back, the products.

No token is dropped. Experts are split over the mesh axis `expert`, whose shards have tokens of
their own, and each expert's columns over `tensor`. Tokens travel in one of two ways: every shard
gets all tokens of its neighbours (an all-gather), or each only those that one of its experts has to
answer (an all-to-all, with room for as many as evenly routed tokens would need; a step with more
goes the first way). What shards say of a token comes back by an all-to-all.
"""

import math
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.mlp import activate, gated_mlp
from jaxserve.models.quant import Form, Quantized, scale_axes
from jaxserve.models.routing import route
from jaxserve.models.spec import Mixture, ModelSpec
from pallas_kernels.grouped_matmul.api import Demand, GroupedMatmul, Groups, Options
from pallas_kernels.grouped_matmul.grouping import arrange, blocks_needed
from sharding.mesh import device_kind
from sharding.rules import LANES, partition

ROWS_AT_ONCE = (
    2**13
    # from so many rows on, an expert shard computes what it expects, and then the rest if there is
    # any
)
# an all-to-all that moves more than this share of what an all-gather does is not worth its fallback
WORTH_IT = 0.75


def axes(spec: ModelSpec) -> dict:
    """Name -> axes of the parameters of a layer with experts, nested."""
    mixture = spec.mixture
    assert mixture
    experts = {"gate_up": "ECDF", "down": "EFD"}
    if mixture.expert_bias:
        experts |= {"gate_up_bias": "ECF", "down_bias": "ED"}
    found: dict = {"router": "DO", "experts": experts}
    if mixture.router_bias:
        found |= {"router_bias": "O"}
    if mixture.corrected:
        found |= {"correction": "O"}
    if mixture.d_shared:
        found |= {"shared": {"gate_up": "DCF", "down": "FD"}}
    if mixture.shared_gate:
        found |= {"shared_gate": "D"}
    return found


def room(mixture: Mixture, tokens: int, shards: int) -> int | None:
    """Tokens that one shard may send another in an all-to-all; None where gathering all of them
    costs hardly more.

    tokens: of one shard. Evenly routed, a token has an expert on a given shard with probability 1 -
    (1 - 1/shards)^X; room is left for four standard deviations more.
    """
    share = 1 - (1 - 1 / shards) ** mixture.taken
    needed = math.ceil(tokens * share + 4 * math.sqrt(tokens * share * (1 - share)))
    rounded = -(-needed // 8) * 8
    return rounded if shards > 1 and rounded <= WORTH_IT * tokens else None


def block_rows(
    mixture: Mixture, tokens: int, shards: int, kernel: GroupedMatmul, dtype: jnp.dtype
) -> int:
    """Rows of a block of one expert, where every shard has so many tokens."""
    return kernel.block_rows(dtype, -(-tokens * shards * mixture.taken // mixture.experts))


def blocks_at_once(mixture: Mixture, tokens: int, assignments: int, shards: int, block: int) -> int:
    """How many blocks an expert shard computes together.

    All that its share of `assignments` may ever be, where that is little; else twice what even
    routing of every shard's `tokens` would send it, since all tokens of all shards may want it.
    """
    local = mixture.experts // shards
    most = blocks_needed(assignments, local, block)
    if shards == 1 or most * block <= ROWS_AT_ONCE:
        return most
    return min(most, -(-2 * tokens * mixture.taken // block) + local)


def products(
    spec: ModelSpec,
    tokens: int,
    mesh: Mesh,
    kernel: GroupedMatmul,
    dtype: jnp.dtype,
    form: Form | None = None,
) -> list[tuple[Options, Demand]]:
    """What a layer asks of the kernel in a step with so many tokens per lane. form: of quantized
    experts.
    """
    mixture = spec.mixture
    assert mixture
    shards, columns = mesh.shape["expert"], mixture.d_expert // mesh.shape["tensor"]
    size, kind = block_rows(mixture, tokens, shards, kernel, dtype), device_kind(mesh)
    rows = size * blocks_at_once(mixture, tokens, tokens * shards * mixture.taken, shards, size)
    local = mixture.experts // shards
    up = Demand(rows, local, 2, spec.d_model, columns, dtype, kind)
    down = Demand(rows, local, 1, columns, spec.d_model, dtype, kind)
    if form:
        up, down = (
            each._replace(
                numbers=form.dtype, scales=each.contracted // form.group if form.group else 1
            )
            for each in (up, down)
        )
    return [(Options(size, jnp.dtype(jnp.float32), kind), up), (Options(size, dtype, kind), down)]


@flax.struct.dataclass
class Experts:
    """What expert MLPs need beside weights and activations: fixed for a compiled step, but for
    `live`.
    """

    live: Bool[Array, "T"]  # whether it is a token at all
    spec: ModelSpec = flax.struct.field(pytree_node=False)
    mesh: Mesh = flax.struct.field(pytree_node=False)
    kernel: GroupedMatmul = flax.struct.field(pytree_node=False)

    def __call__(
        self, weights: dict, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T D"], Int[Array, "A E"]]:
        """The layer's answer, and how many tokens of each lane every expert has answered.

        T counts the tokens of all lanes, lane after lane.
        """
        own = axes(self.spec)
        weights = {name: weights[name] for name in own}
        split = jax.tree_util.tree_map_with_path(self._split, own, weights)
        lanes = PartitionSpec(LANES)
        return jax.shard_map(
            self._one_lane,
            mesh=self.mesh,
            in_specs=(split, lanes, lanes),
            out_specs=(lanes, lanes),
            check_vma=False,
        )(weights, x, self.live)

    def _split(self, path: tuple[Any, ...], letters: str, weight: jax.Array | Quantized) -> Any:
        """PartitionSpec of a weight, or of its numbers and its scales."""
        if not isinstance(weight, Quantized):
            return partition(letters, weight.shape, self.mesh)
        of_scales = scale_axes(path[-1].key, letters, weight.form)
        return replace(
            weight,
            values=partition(letters, weight.values.shape, self.mesh),
            scales=partition(of_scales, weight.scales.shape, self.mesh),
        )

    def _one_lane(
        self, weights: dict, x: jax.Array, live: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The same for one lane's tokens and one shard's experts and columns."""
        ids, scales = route(self.mixture, weights, x)
        # In the order of experts, as waves and shards come, so that every sum is of the same
        # numbers one by one.
        ids, scales = lax.sort(
            (jnp.where(live[:, None], ids, self.mixture.experts), scales), num_keys=1
        )
        load = (ids.reshape(-1)[:, None] == jnp.arange(self.mixture.experts)[None]).sum(
            0, dtype=jnp.int32
        )
        out = self._exchange(weights["experts"], x, ids, scales).astype(jnp.float32)
        if self.mixture.d_shared:
            out = out + self._shared(weights, x)
        return lax.psum(out.astype(x.dtype), "tensor"), load[None]

    @property
    def mixture(self) -> Mixture:
        assert self.spec.mixture
        return self.spec.mixture

    @property
    def _shards(self) -> int:
        return self.mesh.shape["expert"]

    def _shared(self, weights: dict, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Of the MLP that all tokens take, this shard's columns' part."""
        out = gated_mlp(self.spec, weights["shared"], x)
        if not self.mixture.shared_gate:
            return out
        logit = (x.astype(jnp.float32) * weights["shared_gate"].astype(jnp.float32)[None]).sum(
            -1, keepdims=True
        )
        return jax.nn.sigmoid(logit) * out

    # ---- between shards

    def _exchange(
        self, weights: dict, x: jax.Array, ids: jax.Array, scales: jax.Array
    ) -> jax.Array:
        """The experts' part of the answer, wherever they are."""
        if self._shards == 1:
            return self._compute(len(x), weights, x, ids, scales)
        peer = ids // (self.mixture.experts // self._shards)  # of a token that is none: no shard
        space = room(self.mixture, len(x), self._shards)
        if space is None:
            return self._gather(weights, x, ids, scales, peer)
        goes = (peer[:, :, None] == jnp.arange(self._shards)[None, None]).any(1)  # [T, shards]
        crowded = lax.psum(
            (goes.sum(0) > space).any().astype(jnp.int32), LANES
        )  # the same on all shards
        return lax.cond(
            crowded == 0,
            lambda: self._all_to_all(weights, x, ids, scales, peer, goes, space),
            lambda: self._gather(weights, x, ids, scales, peer),
        )

    def _gather(
        self, weights: dict, x: jax.Array, ids: jax.Array, scales: jax.Array, peer: jax.Array
    ) -> jax.Array:
        """All tokens of the neighbours come, what is said of them goes back."""
        everyone = [lax.all_gather(part, "expert", tiled=True) for part in (x, ids, scales)]
        answers = self._compute(len(x), weights, *everyone).reshape(self._shards, *x.shape)
        place = jnp.broadcast_to(jnp.arange(len(x))[:, None], (len(x), self._shards))
        return self._sum(lax.all_to_all(answers, "expert", 0, 0), peer, place)

    def _all_to_all(
        self,
        weights: dict,
        x: Float[Array, "T D"],
        ids: Int[Array, "T X"],
        scales: Float[Array, "T X"],
        peer: Int[Array, "T X"],
        goes: Bool[Array, "T n"],
        space: int,
    ) -> Float[Array, "T D"]:
        """Every token once to each of the shards that it has experts on."""
        place = jnp.where(goes, jnp.cumsum(goes, axis=0) - 1, space)  # [T, n]
        token = jnp.broadcast_to(jnp.arange(len(x))[:, None], place.shape)
        sent = (
            jnp.full((self._shards, space), len(x))
            .at[jnp.arange(self._shards)[None], place]
            .set(token, mode="drop")
        )
        parcels = (
            x.at[sent].get(mode="fill", fill_value=0),
            ids.at[sent].get(mode="fill", fill_value=self.mixture.experts),
            scales.at[sent].get(mode="fill", fill_value=0),
        )
        arrived = [lax.all_to_all(part, "expert", 0, 0) for part in parcels]
        answers = self._compute(
            len(x), weights, *(part.reshape(-1, part.shape[-1]) for part in arrived)
        )
        return self._sum(
            lax.all_to_all(answers.reshape(arrived[0].shape), "expert", 0, 0), peer, place
        )

    def _sum(
        self, answers: Float[Array, "n S D"], peer: Int[Array, "T X"], place: Int[Array, "T n"]
    ) -> Float[Array, "T D"]:
        """Of what the shards say of every token, in the order of its experts: so that the sum is
        the same to the last bit, whichever way the tokens went, and whoever went with them.

        place: where a token's answer stands among those of each shard.
        """
        out = jnp.zeros((len(peer), answers.shape[-1]), jnp.float32)
        for k in range(self.mixture.taken):
            first = (peer[:, :k] != peer[:, k : k + 1]).all(-1) & (peer[:, k] < self._shards)
            at = jnp.minimum(peer[:, k], self._shards - 1)
            answer = answers[at, jnp.take_along_axis(place, at[:, None], axis=1)[:, 0]]
            out = out + jnp.where(first[:, None], answer.astype(jnp.float32), 0)
        return out.astype(answers.dtype)

    # ---- on one shard

    def _compute(
        self,
        tokens: int,
        weights: dict,
        x: Float[Array, "S D"],
        ids: Int[Array, "S X"],
        scales: Float[Array, "S X"],
    ) -> Float[Array, "S D"]:
        """What this shard's experts and columns contribute to these tokens; every shard has
        `tokens` of its own.

        No array is summed up by scattering into it: on a GPU the order of the sums, and their last
        bits, would vary.
        """
        experts = self.mixture.experts // self._shards
        local = ids - lax.axis_index("expert") * experts
        local = jnp.where((local >= 0) & (local < experts), local, experts)
        size = block_rows(self.mixture, tokens, self._shards, self.kernel, x.dtype)
        at_once = blocks_at_once(self.mixture, tokens, ids.size, self._shards, size)
        groups, position = arrange(local.reshape(-1), experts, size)
        position = position.reshape(ids.shape)
        waves = -(-len(groups.experts) // at_once)
        owners = jnp.pad(groups.experts, (0, at_once * waves - len(groups.experts)))
        token = jnp.broadcast_to(jnp.arange(len(x))[:, None], ids.shape)
        source = jnp.zeros(len(owners) * size, jnp.int32).at[position].set(token, mode="drop")

        # A token's answers are fetched at once where they are few, else one by one: no array shall
        # hold very many.
        taken = self.mixture.taken
        turns = (
            [slice(0, taken)]
            if ids.size <= ROWS_AT_ONCE
            else [slice(k, k + 1) for k in range(taken)]
        )

        def add(wave: jax.Array | int, sums: jax.Array) -> jax.Array:
            first, rows = wave * at_once, at_once * size
            these = Groups(
                lax.dynamic_slice_in_dim(owners, first, at_once),
                jnp.clip(groups.live - first, 0, at_once),
            )
            answers = self._mlp(
                weights, x[lax.dynamic_slice_in_dim(source, first * size, rows)], these, size
            )
            for some in turns:
                at = position[:, some] - first * size
                found = answers.at[at].get(mode="clip").astype(jnp.float32) * scales[:, some, None]
                here = (at >= 0) & (at < rows) & (local[:, some] < experts)
                for k in range(
                    found.shape[1]
                ):  # in order: a wave may end between any two of a token's experts
                    sums = sums + jnp.where(here[:, k, None], found[:, k], 0)
            return sums

        nothing = jnp.zeros(x.shape, jnp.float32)
        sums = (
            add(0, nothing)
            if waves == 1
            else lax.fori_loop(0, -(-groups.live // at_once), add, nothing)
        )
        return sums.astype(x.dtype)

    def _mlp(
        self, weights: dict, x: Float[Array, "M D"], groups: Groups, block: int
    ) -> Float[Array, "M D"]:
        """Every row through its expert."""
        wide, narrow = (
            Options(block, dtype, device_kind(self.mesh))
            for dtype in (jnp.dtype(jnp.float32), x.dtype)
        )
        both = self._multiply(x, weights["gate_up"], groups, wide)
        if self.mixture.expert_bias:
            both = _add_bias(both, weights["gate_up_bias"], groups, block)
        hidden = activate(self.spec, both[:, 0], both[:, 1]).astype(x.dtype)
        down = jax.tree.map(lambda w: w[:, None], weights["down"])
        out = self._multiply(hidden, down, groups, narrow)
        if self.mixture.expert_bias:  # once, not on every shard of its columns
            bias = jnp.where(lax.axis_index("tensor") == 0, weights["down_bias"], 0)
            out = _add_bias(out, bias[:, None], groups, block)
        return out[:, 0]

    def _multiply(
        self, x: jax.Array, weight: jax.Array | Quantized, groups: Groups, options: Options
    ) -> jax.Array:
        if isinstance(weight, Quantized):
            return self.kernel.multiply(x, weight.values, groups, options, weight.scales)
        return self.kernel.multiply(x, weight, groups, options)


def _add_bias(
    x: Float[Array, "M C F"], bias: Float[Array, "E C F"], groups: Groups, block: int
) -> Float[Array, "M C F"]:
    by_block = x.reshape(-1, block, *x.shape[1:]) + bias[groups.experts][:, None].astype(x.dtype)
    return by_block.reshape(x.shape)
