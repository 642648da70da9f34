"""Runs the decoder over one page pool without an engine: logits of prompts and of decode steps."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import Mixer, forward, logits
from jaxserve.models.layer_kind import LayerState
from jaxserve.models.moe import Experts
from jaxserve.models.sharded_attention import Attend
from jaxserve.models.sharded_state import LayerStates, Recurrence, StateRows, states_of
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.gated_delta import chunked as gated_delta
from jaxserve.pallas_kernels.grouped_matmul import reference as grouped
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import Options, Ragged
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.loading.loaded import load_params


def one_device_mesh() -> Mesh:
    return MeshSpec().build(jax.devices())


class Decoder:
    """A checkpoint with pages for `rows` sequences of up to `context` tokens.

    Pages are assigned in shuffled order. kv: the dtype of pages, if it is not that of the weights.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        rows: int,
        context: int,
        page_size: int,
        dtype: str = "float32",
        weights: str = "auto",
        kv: str = "",
        product: CpuProduct | None = None,
    ):
        checkpoint = HFCheckpoint.open(folder)
        self.spec: ModelSpec = read_spec(checkpoint.config)[1].on(mesh.shape["tensor"])
        self.params = load_params(checkpoint, mesh, dtype, weights, product)
        self.mesh = mesh
        self.page_size = page_size
        width = -(-context // page_size)
        order = np.random.default_rng(0).permutation(rows * width).astype(np.int32)
        self.tables = jnp.asarray(order.reshape(1, rows, width))
        self.stored = jnp.dtype(kv) if kv else self.params["embed"].dtype
        group = self.spec.page_groups()[0]
        pages = reference.allocate(rows * width, group.layout(page_size, self.stored))
        one = jax.tree.map(lambda x: x[None], pages)
        self.kept = tuple(
            _states(kind.state, rows) if kind.state else one for kind in self.spec.kinds
        )
        self._step = jax.jit(self._run, static_argnames="decode")

    def __call__(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Return logits [R, C, V] of tokens [R, C] at positions start..start+C-1 of every row."""
        values, self.kept, self.load = self._step(
            self.params,
            self.kept,
            jnp.asarray(tokens),
            jnp.int32(start),
            decode=tokens.shape[1] == 1,
        )
        return np.asarray(values)

    def _run(self, params, kept, tokens, start, decode):
        rows, size = tokens.shape
        positions = jnp.broadcast_to(start + jnp.arange(size), (rows, size))
        entry = jnp.take_along_axis(self.tables[0], positions // self.page_size, axis=1)
        ragged = Ragged(
            tables=self.tables,
            lengths=jnp.full((1, rows), start + size),
            starts=(jnp.arange(rows + 1) * size)[None],
            split=jnp.array([[rows if size == 1 else 0, rows]]),
            page=entry.reshape(1, -1),
            offset=(positions % self.page_size).reshape(1, -1),
        )
        recurrence = Recurrence(
            self._state_rows(rows, size, start),
            self.page_size,
            self.mesh,
            gated_delta,
            1 if decode else None,
        )
        mixers: dict[int, Mixer] = dict.fromkeys(self.spec.state_layers, recurrence)
        for group in self.spec.page_groups():
            layout = group.layout(self.page_size, self.stored, self.mesh.shape["tensor"])
            options = Options(
                layout,
                self.spec.score_scale,
                group.window,
                self.spec.attn_softcap,
                1 if decode else None,
            )
            mixers |= dict.fromkeys(group.layers, Attend(ragged, self.mesh, reference, options))
        by_layer = tuple(mixers[layer] for layer in range(self.spec.num_layers))
        experts = Experts(jnp.ones(tokens.size, bool), self.spec, self.mesh, grouped)
        done = forward(
            params, self.spec, kept, tokens.reshape(-1), positions.reshape(-1), by_layer, experts
        )
        values = logits(params, self.spec, done.hidden).reshape(rows, size, -1)
        return values, done.written, done.load

    def _state_rows(self, rows: int, size: int, start: jax.Array) -> StateRows:
        """Return a step in which each row has `size` tokens from `start` on, and one slot."""
        slots = jnp.arange(rows)
        found = StateRows(
            table=jnp.broadcast_to(slots[:, None], self.tables.shape[1:]),
            begin=jnp.full(rows, start),
            starts=slots * size,
            sizes=jnp.full(rows, size),
            chunk=jnp.repeat(slots, size),
            live=jnp.ones(rows * size, bool),
        )
        return jax.tree.map(lambda x: x[None], found)


def _states(state: LayerState, rows: int) -> LayerStates:
    """Return the states of one layer, each in the slot of its row; they hold no zeros at first."""
    return jax.tree.map(lambda x: jnp.full((1, *x.shape), 7, x.dtype), states_of(state, rows))
