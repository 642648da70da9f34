"""Reads and writes of pages for other engines: bit for bit through every kernel's layout, and in
place.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.engine.buckets import page_counts
from jaxserve.engine.device.page_io import PageIO, sources
from jaxserve.engine.device.state import abstract_state, new_state
from jaxserve.engine.host.page_pool import NO_PAGE
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import ConfigError, EngineError
from jaxserve.models.spec import ModelSpec
from pallas_kernels import dispatch
from pallas_kernels.paged_attention.api import Pages, quantize
from sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import BASE, LATENT, SPEC, WINDOWED, make_engine

PAGES, SIZE = 6, 4
WIDTHS = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "fp8": ml_dtypes.float8_e4m3fn,
}


class Store:
    """The pages of an engine, and what reads and writes them."""

    def __init__(
        self, spec: ModelSpec, mesh_spec: MeshSpec, kernel: str = "reference", kv: str = "float32"
    ):
        self.spec, mesh = spec.on(mesh_spec.tensor), mesh_spec.build(jax.devices())
        windows = [group.window for group in spec.page_groups()]
        self.config = config_of(windows, mesh_spec.lanes, kv)
        implementation = dispatch.IMPLEMENTATIONS[kernel]
        abstract = abstract_state(self.spec, self.config, mesh, implementation)
        self.io = PageIO(self.spec, self.config, mesh, implementation, jnp.dtype(jnp.float32))
        self.io.programs |= {
            name: program.compile() for name, program in self.io.lowered(abstract.pages)
        }
        self.pages: tuple[Pages, ...] = new_state(abstract).pages

    def write(self, lane: int, ids: list[int], piece: KVSegment) -> None:
        self.io.check(piece)
        uploaded = self.io.upload(piece.group, piece.arrays)
        self.pages = self.io.write(self.pages, lane, piece.group, ids, uploaded)

    def read(self, lane: int, group: int, ids: list[int]) -> KVSegment:
        return KVSegment(group, 0, **self.io.read(self.pages, lane, group, ids).to_host())


def config_of(windows: list[int | None], lanes: int, kv: str) -> EngineConfig:
    options = EngineOptions(
        kv=kv,
        page_size=SIZE,
        cache_tokens=PAGES * SIZE,
        max_context=4 * SIZE,
        max_batch=2,
        page_exchange=True,
    )
    return resolve(options, max_positions=96, lanes=lanes, affordable_tokens=10**6, windows=windows)


def random_piece(spec: ModelSpec, group: int, pages: int, kv: str, seed: int = 0) -> KVSegment:
    """Of the model's own heads: numbers of all signs, and scales as there may be."""
    rng, found = np.random.default_rng(seed), spec.page_groups()[group]
    shape = (len(found.layers), pages * SIZE, found.kv_heads, found.head_dim)

    def numbers() -> np.ndarray:
        return (rng.normal(size=shape) * 50).astype(WIDTHS[kv])

    scales = [
        rng.uniform(0.1, 2, shape[:-1]).astype(np.float32) if kv in ("int8", "fp8") else None
        for _ in "kv"
    ]
    if spec.latent:
        return KVSegment(group, 0, numbers(), None, scales[0])
    return KVSegment(group, 0, numbers(), numbers(), *scales)


def same(one: KVSegment, other: KVSegment) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert array.flags.c_contiguous and array.dtype == other.arrays[name].dtype
        np.testing.assert_array_equal(array.view(np.uint8), other.arrays[name].view(np.uint8))


def cases() -> Iterator[tuple[ModelSpec, MeshSpec, str, str]]:
    for kernel in ("reference", "tpu", "gpu"):
        yield SPEC, MeshSpec(tensor=2), kernel, "float32"
        yield LATENT, MeshSpec(tensor=2), kernel, "int8"
    yield SPEC, MeshSpec(), "tpu", "fp8"
    yield SPEC, MeshSpec(data=2, tensor=4), "reference", "int8"  # two copies of each head
    yield WINDOWED, MeshSpec(data=2, expert=2), "reference", "bfloat16"


@pytest.mark.parametrize(("spec", "mesh", "kernel", "kv"), list(cases()))
def test_what_was_written_is_read_bit_for_bit(
    spec: ModelSpec, mesh: MeshSpec, kernel: str, kv: str
) -> None:
    """In one lane, and nothing beside it in this one or another."""
    store = Store(spec, mesh, kernel, kv)
    lane = mesh.lanes - 1
    for group in range(len(spec.page_groups())):
        many, one = page_counts(store.config)
        first, second = (
            random_piece(spec, group, many, kv),
            random_piece(spec, group, one, kv, seed=1),
        )
        before = store.read(0, group, [5])
        store.write(lane, [4, 0, NO_PAGE, 2], first)
        store.write(lane, [3], second)
        found = store.read(lane, group, [4, 0, 3, 2])
        expected = {name: x.copy() for name, x in first.arrays.items()}
        for name, x in expected.items():
            x[:, 2 * SIZE : 3 * SIZE] = second.arrays[name]
        same(found, KVSegment(group, 0, **expected))
        same(store.read(lane, group, [5]), before)
        if mesh.lanes > 1:
            same(store.read(0, group, [4]), before)


@pytest.mark.parametrize(
    ("wide", "kv"), [("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "fp8")]
)
@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["k and v", "latent"])
def test_narrowed_as_a_step_stores_it(spec: ModelSpec, wide: str, kv: str) -> None:
    store, piece = Store(spec, MeshSpec(tensor=2), kv=kv), random_piece(spec, 0, 1, wide)
    store.write(0, [3], piece)
    narrow = jax.jit(lambda x: quantize(x, jnp.dtype(WIDTHS[kv])))
    expected: dict[str, np.ndarray] = {}
    for name, x in piece.arrays.items():
        if kv == "bfloat16":
            expected[name] = x.astype(ml_dtypes.bfloat16)
        else:
            numbers, scale = narrow(x)
            expected |= {name: np.asarray(numbers), f"{name}_scale": np.asarray(scale)}
    same(store.read(0, 0, [3]), KVSegment(0, 0, **expected))


def test_what_pages_can_be_made_of() -> None:
    assert sources("float32", "float32") == ("float32",)
    assert sources("bfloat16", "float32") == ("float32", "bfloat16")
    assert sources("bfloat16", "bfloat16") == ("bfloat16",)
    assert sources("int8", "float32") == ("float32", "bfloat16", "int8")
    assert sources("float8_e4m3fn", "bfloat16") == ("bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("theirs", "ours", "asked"),
    [
        ("bfloat16", "float32", "float32"),
        ("int8", "bfloat16", "bfloat16"),
        ("int8", "fp8", "float8_e4m3fn"),
    ],
)
def test_never_widened(theirs: str, ours: str, asked: str) -> None:
    store = Store(SPEC, MeshSpec(), kv=ours)
    with pytest.raises(
        ConfigError, match=f"pages of {theirs} cannot be made pages of {asked}: .* never widened"
    ):
        store.io.check(random_piece(SPEC, 0, 1, theirs))


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        (
            random_piece(replace(SPEC, num_layers=3), 0, 1, "float32"),
            r"keys \[3, 4, 2, 8\].* the model's are \[2, 4",
        ),
        (random_piece(replace(SPEC, num_kv_heads=4), 0, 1, "float32"), r"keys \[2, 4, 4, 8\]"),
        (random_piece(replace(SPEC, head_dim=6), 0, 1, "float32"), r"keys \[2, 4, 2, 6\]"),
        (KVSegment(0, 0, np.zeros((2, 4, 2, 8), np.float32)), r"keys \[2, 4, 2, 8\] and no values"),
        (
            KVSegment(1, 0, np.zeros((2, 4, 2, 8), np.float32)),
            "a piece of page group 1; the model has 1",
        ),
    ],
)
def test_another_model_s(theirs: KVSegment, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        Store(SPEC, MeshSpec(tensor=4)).io.check(theirs)


def nbytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_pages_are_written_in_place(kv: str) -> None:
    """And neither reads nor writes copy more than what travels. Of one head, which XLA:CPU copies,
    tests/deviceless know more.
    """
    options = replace(BASE, page_size=16, cache_tokens=2**18, kv=kv, page_exchange=True)
    engine, runner = make_engine(options)
    for name, lowered in runner.lowering.page_programs().items():
        memory, state = lowered.compile().memory_analysis(), runner.lowering.state
        assert memory.alias_size_in_bytes == (
            nbytes(state.pages) if name.startswith("write") else 0
        ), name
        assert memory.temp_size_in_bytes < nbytes(state.pages[0]) / 10, name
    engine.close()


def test_an_engine_that_exchanges_none_compiles_none() -> None:
    engine, runner = make_engine(BASE)
    assert not runner.lowering.page_programs() and not runner.lowering.page_io.most_bytes
    engine.close()


def test_memory_is_planned_for_what_is_on_its_way() -> None:
    """Four pieces, of the pages that 512 tokens or a sequence have, in the widest dtype."""
    store = Store(SPEC, MeshSpec(tensor=2), kv="int8")
    tokens = 4 * SIZE
    assert store.io.most_bytes == 4 * 2 * tokens * 2 * 1 * 8 * 4, (
        "pieces, layers, k and v, heads of a shard"
    )
