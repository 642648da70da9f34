"""Mixture-of-experts MLPs on a mesh: routing, and the way of tokens to their experts and back.

No token is dropped. Experts are split over the mesh axis `expert`, whose shards also have tokens of
their own, and each expert's columns over `tensor`. Tokens reach their experts in one of two ways:

- by an all-gather, every shard gets all tokens of the shards along the axis;
- by an all-to-all, a shard gets only tokens that one of its experts has to answer, with room for as
  many as evenly routed tokens would need. A step that needs more room uses the all-gather.

The shards' answers come back by an all-to-all and are summed up where the token came from.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.local_experts import LocalExperts
from jaxserve.models.mixture import Mixture
from jaxserve.models.mlp import gated_mlp
from jaxserve.models.moe_sizes import all_to_all_capacity
from jaxserve.models.quant import Quantized, scale_axes
from jaxserve.models.routing import route
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.grouped_matmul.api import GroupedMatmul
from jaxserve.sharding.rules import DP_AXES, partition


def axes(spec: ModelSpec) -> dict:
    """Return parameter name -> axes of a layer with experts; a dict for a nested block."""
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experts:
    """The expert layers of a step: called with a layer's weights and activations.

    All fields except `live` are fixed in a compiled step.
    """

    live: Bool[Array, "T"]  # false for padding, which takes no expert
    spec: ModelSpec = field(metadata={"static": True})
    mesh: Mesh = field(metadata={"static": True})
    kernel: GroupedMatmul = field(metadata={"static": True})

    def __call__(
        self, weights: dict, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T D"], Int[Array, "A E"]]:
        """Return the layer's answer, and for each lane how many tokens each expert answered.

        T counts the tokens of all lanes, lane after lane.
        """
        own = axes(self.spec)
        weights = {name: weights[name] for name in own}
        split = jax.tree_util.tree_map_with_path(self._split, own, weights)
        lanes = PartitionSpec(DP_AXES)
        return jax.shard_map(
            self._one_lane,
            mesh=self.mesh,
            in_specs=(split, lanes, lanes),
            out_specs=(lanes, lanes),
            check_vma=False,
        )(weights, x, self.live)

    def _split(self, path: tuple[Any, ...], letters: str, weight: jax.Array | Quantized) -> Any:
        """Return the PartitionSpec of a weight, or those of its numbers and scales."""
        if not isinstance(weight, Quantized):
            return partition(letters, weight.shape, self.mesh)
        scale_letters = scale_axes(path[-1].key, letters, weight.scheme)
        return replace(
            weight,
            values=partition(letters, weight.values.shape, self.mesh),
            scales=partition(scale_letters, weight.scales.shape, self.mesh),
        )

    def _one_lane(
        self, weights: dict, x: jax.Array, live: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Answer one lane's tokens with one shard's experts and columns, inside shard_map."""
        ids, scales = route(self.mixture, weights, x)
        # Experts in ascending order, as waves and shards have them: every sum then adds the same
        # numbers one by one, whichever way the tokens take.
        ids, scales = lax.sort(
            (jnp.where(live[:, None], ids, self.mixture.experts), scales), num_keys=1
        )
        load = (ids.reshape(-1)[:, None] == jnp.arange(self.mixture.experts)[None]).sum(
            0, dtype=jnp.int32
        )
        out = self._routed(weights["experts"], x, ids, scales).astype(jnp.float32)
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

    @property
    def _local(self) -> LocalExperts:
        return LocalExperts(self.spec, self.mesh, self.kernel)

    def _shared(self, weights: dict, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return this shard's columns' part of the MLP that all tokens take."""
        out = gated_mlp(self.spec, weights["shared"], x)
        if not self.mixture.shared_gate:
            return out
        logit = (x.astype(jnp.float32) * weights["shared_gate"].astype(jnp.float32)[None]).sum(
            -1, keepdims=True
        )
        return jax.nn.sigmoid(logit) * out

    def _routed(self, weights: dict, x: jax.Array, ids: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the routed experts' part of the answer, on whichever shard they are."""
        if self._shards == 1:
            return self._local(len(x), weights, x, ids, scales)
        # Padding has the id `experts`, and so a peer that is no shard.
        peer = ids // (self.mixture.experts // self._shards)
        capacity = all_to_all_capacity(self.mixture, len(x), self._shards)
        if capacity is None:
            return self._by_all_gather(weights, x, ids, scales, peer)
        goes = (peer[:, :, None] == jnp.arange(self._shards)[None, None]).any(1)  # [T, shards]
        # Summed over all shards, since all of them have to take the same branch.
        crowded = lax.psum((goes.sum(0) > capacity).any().astype(jnp.int32), DP_AXES)
        return lax.cond(
            crowded == 0,
            lambda: self._by_all_to_all(weights, x, ids, scales, peer, goes, capacity),
            lambda: self._by_all_gather(weights, x, ids, scales, peer),
        )

    def _by_all_gather(
        self, weights: dict, x: jax.Array, ids: jax.Array, scales: jax.Array, peer: jax.Array
    ) -> jax.Array:
        """Answer the tokens of all shards along the axis, and send the answers back."""
        everyone = [lax.all_gather(part, "expert", tiled=True) for part in (x, ids, scales)]
        answers = self._local(len(x), weights, *everyone).reshape(self._shards, *x.shape)
        place = jnp.broadcast_to(jnp.arange(len(x))[:, None], (len(x), self._shards))
        return self._combine(lax.all_to_all(answers, "expert", 0, 0), peer, place)

    def _by_all_to_all(
        self,
        weights: dict,
        x: Float[Array, "T D"],
        ids: Int[Array, "T X"],
        scales: Float[Array, "T X"],
        peer: Int[Array, "T X"],
        goes: Bool[Array, "T n"],
        capacity: int,
    ) -> Float[Array, "T D"]:
        """Send every token once to each shard with its experts (`goes`), and answer arrivals."""
        # A token's place in the parcel for each shard; `capacity`, which is dropped, if none.
        place = jnp.where(goes, jnp.cumsum(goes, axis=0) - 1, capacity)  # [T, n]
        token = jnp.broadcast_to(jnp.arange(len(x))[:, None], place.shape)
        sent = (
            jnp.full((self._shards, capacity), len(x))
            .at[jnp.arange(self._shards)[None], place]
            .set(token, mode="drop")
        )
        parcels = (
            x.at[sent].get(mode="fill", fill_value=0),
            ids.at[sent].get(mode="fill", fill_value=self.mixture.experts),
            scales.at[sent].get(mode="fill", fill_value=0),
        )
        arrived = [lax.all_to_all(part, "expert", 0, 0) for part in parcels]
        rows = (part.reshape(-1, part.shape[-1]) for part in arrived)
        answers = self._local(len(x), weights, *rows).reshape(arrived[0].shape)
        return self._combine(lax.all_to_all(answers, "expert", 0, 0), peer, place)

    def _combine(
        self, answers: Float[Array, "n S D"], peer: Int[Array, "T X"], place: Int[Array, "T n"]
    ) -> Float[Array, "T D"]:
        """Sum up the shards' answers for every token, in the order of its experts.

        With that order the sum is the same to the last bit, whichever way the token went and
        whatever tokens went with it.

        Args:
            place: Index of a token's answer among those of each shard.
        """
        out = jnp.zeros((len(peer), answers.shape[-1]), jnp.float32)
        for k in range(self.mixture.taken):
            # A shard's one answer for a token is already the sum over its experts there.
            first = (peer[:, :k] != peer[:, k : k + 1]).all(-1) & (peer[:, k] < self._shards)
            at = jnp.minimum(peer[:, k], self._shards - 1)
            answer = answers[at, jnp.take_along_axis(place, at[:, None], axis=1)[:, 0]]
            out = out + jnp.where(first[:, None], answer.astype(jnp.float32), 0)
        return out.astype(answers.dtype)
