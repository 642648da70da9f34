"""The expert MLPs of one shard: tokens sorted by expert, multiplied block by block."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.models.mixture import Mixture
from jaxserve.models.mlp import activate
from jaxserve.models.moe_sizes import block_rows, blocks_at_once, fits_at_once
from jaxserve.models.quant import Quantized
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.grouped_matmul.api import GroupedMatmul, Groups, Options
from jaxserve.pallas_kernels.grouped_matmul.grouping import arrange
from jaxserve.sharding.mesh import device_kind


class _Blocks(NamedTuple):
    """Rows of tokens in blocks of one expert each, computed in waves of `at_once` blocks."""

    rows: int  # of a block
    at_once: int
    waves: int
    experts: int  # of this shard
    local: Int[Array, "S X"]  # index among this shard's experts; `experts` for those of others
    position: Int[Array, "S X"]  # row of a token's pass through its expert
    owners: Int[Array, "b"]  # expert of each block, padded to whole waves
    live: jax.Array  # number of blocks in use, a scalar
    source: Int[Array, "M"]  # token of each row


@dataclass(frozen=True)
class LocalExperts:
    """The experts and columns of one shard, called inside shard_map."""

    spec: ModelSpec
    mesh: Mesh
    kernel: GroupedMatmul

    def __call__(
        self,
        tokens: int,
        weights: dict,
        x: Float[Array, "S D"],
        ids: Int[Array, "S X"],
        scales: Float[Array, "S X"],
    ) -> Float[Array, "S D"]:
        """Return what this shard's experts and columns contribute to the answers of S tokens.

        No array is summed by scattering into it: on a GPU the order of such sums, and with it
        their last bits, would vary from run to run.

        Args:
            tokens: Number of tokens that every shard has of its own, from which sizes follow.
            ids: Experts that each token takes.
            scales: Weights of the experts' answers.
        """
        blocks = self._arrange(tokens, ids, x)
        add = partial(self._add_wave, weights, x, scales, blocks)
        nothing = jnp.zeros(x.shape, jnp.float32)
        if blocks.waves == 1:
            sums = add(0, nothing)
        else:
            sums = lax.fori_loop(0, -(-blocks.live // blocks.at_once), add, nothing)
        return sums.astype(x.dtype)

    @property
    def _mixture(self) -> Mixture:
        assert self.spec.mixture
        return self.spec.mixture

    def _arrange(self, tokens: int, ids: Int[Array, "S X"], x: Float[Array, "S D"]) -> _Blocks:
        """Give every pair of a token and a local expert its row in a block of that expert."""
        shards = self.mesh.shape["expert"]
        experts = self._mixture.experts // shards
        local = ids - lax.axis_index("expert") * experts
        local = jnp.where((local >= 0) & (local < experts), local, experts)
        size = block_rows(self._mixture, tokens, shards, self.kernel, x.dtype)
        at_once = blocks_at_once(self._mixture, tokens, ids.size, shards, size)
        groups, position = arrange(local.reshape(-1), experts, size)
        position = position.reshape(ids.shape)
        waves = -(-len(groups.experts) // at_once)
        owners = jnp.pad(groups.experts, (0, at_once * waves - len(groups.experts)))
        token = jnp.broadcast_to(jnp.arange(len(x))[:, None], ids.shape)
        source = jnp.zeros(len(owners) * size, jnp.int32).at[position].set(token, mode="drop")
        return _Blocks(
            rows=size,
            at_once=at_once,
            waves=waves,
            experts=experts,
            local=local,
            position=position,
            owners=owners,
            live=groups.live,
            source=source,
        )

    def _add_wave(
        self,
        weights: dict,
        x: Float[Array, "S D"],
        scales: Float[Array, "S X"],
        blocks: _Blocks,
        wave: jax.Array | int,
        sums: Float[Array, "S D"],
    ) -> Float[Array, "S D"]:
        """Compute one wave of blocks and add its answers to the tokens' float32 sums."""
        first = wave * blocks.at_once
        rows = blocks.at_once * blocks.rows
        groups = Groups(
            lax.dynamic_slice_in_dim(blocks.owners, first, blocks.at_once),
            jnp.clip(blocks.live - first, 0, blocks.at_once),
        )
        source = lax.dynamic_slice_in_dim(blocks.source, first * blocks.rows, rows)
        answers = self._mlp(weights, x[source], groups, blocks.rows)
        for some in self._turns(blocks.local.size):
            at = blocks.position[:, some] - first * blocks.rows
            found = answers.at[at].get(mode="clip").astype(jnp.float32) * scales[:, some, None]
            here = (at >= 0) & (at < rows) & (blocks.local[:, some] < blocks.experts)
            # One expert after the other: a wave may end between any two of a token's experts, and
            # the sum must be of the same numbers in the same order whatever the wave holds.
            for k in range(found.shape[1]):
                sums = sums + jnp.where(here[:, k, None], found[:, k], 0)
        return sums

    def _turns(self, assignments: int) -> list[slice]:
        """Return which of a token's experts have their answers gathered together.

        All at once where that is little; else one by one, to bound the gathered array.
        """
        taken = self._mixture.taken
        if fits_at_once(assignments):
            return [slice(0, taken)]
        return [slice(k, k + 1) for k in range(taken)]

    def _mlp(
        self, weights: dict, x: Float[Array, "M D"], groups: Groups, block: int
    ) -> Float[Array, "M D"]:
        """Pass every row through the expert of its block."""
        kind = device_kind(self.mesh)
        wide = Options(block, jnp.dtype(jnp.float32), kind)
        narrow = Options(block, x.dtype, kind)
        both = self._multiply(x, weights["gate_up"], groups, wide)
        if self._mixture.expert_bias:
            both = _add_bias(both, weights["gate_up_bias"], groups, block)
        hidden = activate(self.spec, both[:, 0], both[:, 1]).astype(x.dtype)
        down = jax.tree.map(lambda w: w[:, None], weights["down"])
        out = self._multiply(hidden, down, groups, narrow)
        if self._mixture.expert_bias:
            # Shards of an expert's columns are summed up afterwards: one of them adds the bias.
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
    """Add to every row the bias of its block's expert."""
    by_block = x.reshape(-1, block, *x.shape[1:]) + bias[groups.experts][:, None].astype(x.dtype)
    return by_block.reshape(x.shape)
