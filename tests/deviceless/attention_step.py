"""Steps of paged attention alone, compiled for an absent chip from shapes and dtypes."""

import importlib.util
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxserve.pallas_kernels.paged_attention.api import (
    Attended,
    Demand,
    Layout,
    Options,
    PagedAttention,
    Pages,
    Ragged,
)
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec, device_kind
from jaxserve.sharding.rules import replicated

CACHE = 64 * 4099  # tokens of a pool, which no memory of a core holds
COMPILERS = {"tpu": "libtpu", "gpu": "jax_cuda13_plugin"}


@dataclass(frozen=True)
class Step:
    """One step on one shard; the defaults are Llama-3-8B's heads.

    dtype: of queries, keys and values. stored: dtype of pages.
    """

    most: int | None = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    page_size: int = 64
    dtype: str = "bfloat16"
    stored: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False
    rows: int = 16
    width: int = 128  # entries of a page table
    chunk: int = 512  # tokens of a step that is no decode step

    def __str__(self) -> str:
        """Name the kind of step and the fields that differ from their defaults."""
        kind = {1: "decode", None: "ragged"}.get(self.most, f"verify{self.most}")
        changed = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return "-".join(
            [kind] + [f"{name}{value}" for name, value in changed.items() if name != "most"]
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.most if self.most else self.chunk

    @property
    def layout(self) -> Layout:
        return Layout(
            self.kv_heads, self.head_dim, self.page_size, jnp.dtype(self.stored), self.value_dim
        )

    def options(self, kind: str) -> Options:
        """Return the options on a chip of this kind."""
        scale = self.head_dim**-0.5
        return Options(
            self.layout, scale, self.window, self.softcap, self.most, self.lse, device_kind=kind
        )

    def pages(self, attention: PagedAttention) -> Pages:
        return jax.eval_shape(partial(attention.allocate, CACHE // self.page_size, self.layout))

    def arguments(self, attention: PagedAttention) -> tuple:
        """Return shapes and dtypes of q, k, v, pages, ragged and sinks."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        rows = self.rows
        tokens = self.tokens
        q, k = (
            jax.ShapeDtypeStruct((tokens, n, self.head_dim), self.dtype)
            for n in (self.heads, self.kv_heads)
        )
        ragged = Ragged(
            ints(rows, self.width), ints(rows), ints(rows + 1), ints(2), ints(tokens), ints(tokens)
        )
        sinks = jax.ShapeDtypeStruct((self.heads,), jnp.float32) if self.sinks else None
        return q, k, None if self.value_dim else k, self.pages(attention), ragged, sinks


def compile_for(
    attention: PagedAttention, chip: str, step: Step
) -> tuple[jax.stages.Compiled, Options]:
    """Compile a step of attention; skip the test where the compiler is not installed."""
    compiler = COMPILERS[CHIPS[chip].platform]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler} (make deviceless)")
    mesh = MeshSpec().build(absent.devices(chip, 1))
    options = step.options(device_kind(mesh))
    attention.check(
        options, Demand(step.heads, step.rows, step.width, jnp.dtype(step.dtype), device_kind(mesh))
    )

    def attend(*arguments: Any) -> Attended:
        *others, sinks = arguments
        return attention.attend(*others, options, sinks)

    on_chip = jax.shard_map(
        attend, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    arguments = jax.tree.map(
        lambda x: x.update(sharding=replicated(mesh)), step.arguments(attention)
    )
    return jax.jit(on_chip, donate_argnums=3).lower(*arguments).compile(), options
