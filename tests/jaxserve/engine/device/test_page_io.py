"""Tests of reads and writes of pages for KV transfer: exact for every kernel, and in place."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.config import EngineConfig, EngineOptions, StateSize, resolve
from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.buckets import page_counts
from jaxserve.engine.device.memory import slot_bytes, state_sizes
from jaxserve.engine.device.page_io import PageIO, accepted_dtypes
from jaxserve.engine.device.page_store import PageStore
from jaxserve.engine.device.state import StateHolder, abstract_state, new_state
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import ConfigError, EngineError
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.paged_attention.api import quantize
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import (
    BASE,
    CONVOLUTIONS,
    LATENT,
    SPEC,
    STATES,
    WINDOWED,
    make_engine,
)

PAGES = 6
SIZE = 4  # tokens of a page
WIDTHS = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "fp8": ml_dtypes.float8_e4m3fn,
}


class Store:
    """The pages of an engine, and the programs that read and write them."""

    def __init__(
        self, spec: ModelSpec, mesh_spec: MeshSpec, kernel: str = "reference", kv: str = "float32"
    ):
        self.spec = spec.on(mesh_spec.tensor)
        mesh = mesh_spec.build(jax.devices())
        windows = [group.window for group in spec.page_groups()]
        self.config = config_of(windows, mesh_spec.lanes, kv, state_sizes(spec))
        implementation = dispatch.IMPLEMENTATIONS[kernel]
        abstract = abstract_state(self.spec, self.config, mesh, implementation)
        self.io = PageIO(self.spec, self.config, mesh, implementation, jnp.dtype(jnp.float32))
        programs = {name: program.compile() for name, program in self.io.lower(abstract.kept)}
        self.pages = PageStore(self.config, self.io, programs, StateHolder(new_state(abstract)))

    def write(self, lane: int, ids: list[int], segment: KVSegment) -> None:
        self.pages.check_segment(segment)
        uploaded = self.pages.upload_pages(segment.group, segment.arrays)
        self.pages.write_pages(lane, segment.group, ids, uploaded)

    def read(self, lane: int, group: int, ids: list[int]) -> KVSegment:
        return KVSegment(group, 0, **self.pages.read_pages(lane, group, ids).to_host())


def config_of(
    windows: list[int | None], lanes: int, kv: str, states: Sequence[StateSize] = ()
) -> EngineConfig:
    options = EngineOptions(
        kv=kv,
        page_size=SIZE,
        cache_tokens=PAGES * SIZE,
        max_context=4 * SIZE,
        max_batch=2,
        page_exchange=True,
        snapshot_share=0.9 if states else None,
    )
    sizes = {"windows": windows, "states": states}
    return resolve(options, max_positions=96, lanes=lanes, affordable_tokens=10**6, **sizes)


def random_segment(spec: ModelSpec, group: int, pages: int, kv: str, seed: int = 0) -> KVSegment:
    """Make a KV segment of the model's own heads, with numbers of all signs."""
    rng = np.random.default_rng(seed)
    found = spec.page_groups()[group]
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


def check_equal_segments(one: KVSegment, other: KVSegment) -> None:
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
def test_written_pages_are_read_bit_for_bit(
    spec: ModelSpec, mesh: MeshSpec, kernel: str, kv: str
) -> None:
    """Other pages of this lane and of other lanes keep what they had."""
    store = Store(spec, mesh, kernel, kv)
    lane = mesh.lanes - 1
    for group in range(len(spec.page_groups())):
        many, one = page_counts(store.config)
        first = random_segment(spec, group, many, kv)
        second = random_segment(spec, group, one, kv, seed=1)
        before = store.read(0, group, [5])
        store.write(lane, [4, 0, NO_PAGE, 2], first)
        store.write(lane, [3], second)
        found = store.read(lane, group, [4, 0, 3, 2])
        expected = {name: x.copy() for name, x in first.arrays.items()}
        for name, x in expected.items():
            x[:, 2 * SIZE : 3 * SIZE] = second.arrays[name]
        check_equal_segments(found, KVSegment(group, 0, **expected))
        check_equal_segments(store.read(lane, group, [5]), before)
        if mesh.lanes > 1:
            check_equal_segments(store.read(0, group, [4]), before)


@pytest.mark.parametrize(
    ("wide", "kv"), [("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "fp8")]
)
@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["k and v", "latent"])
def test_narrowed_as_a_step_stores_it(spec: ModelSpec, wide: str, kv: str) -> None:
    store = Store(spec, MeshSpec(tensor=2), kv=kv)
    segment = random_segment(spec, 0, 1, wide)
    store.write(0, [3], segment)
    narrow = jax.jit(lambda x: quantize(x, jnp.dtype(WIDTHS[kv])))
    expected: dict[str, np.ndarray] = {}
    for name, x in segment.arrays.items():
        if kv == "bfloat16":
            expected[name] = x.astype(ml_dtypes.bfloat16)
        else:
            numbers, scale = narrow(x)
            expected |= {name: np.asarray(numbers), f"{name}_scale": np.asarray(scale)}
    check_equal_segments(store.read(0, 0, [3]), KVSegment(0, 0, **expected))


def test_accepted_dtypes() -> None:
    assert accepted_dtypes("float32", "float32") == ("float32",)
    assert accepted_dtypes("bfloat16", "float32") == ("float32", "bfloat16")
    assert accepted_dtypes("bfloat16", "bfloat16") == ("bfloat16",)
    assert accepted_dtypes("int8", "float32") == ("float32", "bfloat16", "int8")
    assert accepted_dtypes("float8_e4m3fn", "bfloat16") == ("bfloat16", "float8_e4m3fn")


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
        ConfigError, match=f"pages of {theirs} cannot be made pages of {asked}, which are made from"
    ):
        store.pages.check_segment(random_segment(SPEC, 0, 1, theirs))


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        (
            random_segment(replace(SPEC, num_layers=3), 0, 1, "float32"),
            r"keys \[3, 4, 2, 8\].* the model's are \[2, 4",
        ),
        (random_segment(replace(SPEC, num_kv_heads=4), 0, 1, "float32"), r"keys \[2, 4, 4, 8\]"),
        (random_segment(replace(SPEC, head_dim=6), 0, 1, "float32"), r"keys \[2, 4, 2, 6\]"),
        (KVSegment(0, 0, np.zeros((2, 4, 2, 8), np.float32)), r"keys \[2, 4, 2, 8\] and no values"),
        (
            KVSegment(1, 0, np.zeros((2, 4, 2, 8), np.float32)),
            "a KV segment of page group 1; the model has 1",
        ),
    ],
)
def test_another_model_s(theirs: KVSegment, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        Store(SPEC, MeshSpec(tensor=4)).pages.check_segment(theirs)


def nbytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_pages_are_written_in_place(kv: str) -> None:
    """Neither reads nor writes copy more than the pages that travel.

    XLA:CPU copies pages of one head; tests/deviceless checks those with other compilers.
    """
    options = replace(BASE, page_size=16, cache_tokens=2**18, kv=kv, page_exchange=True)
    engine, runner = make_engine(options)
    for name, lowered in runner.lowering.page_programs().items():
        memory = lowered.compile().memory_analysis()
        state = runner.lowering.state
        assert memory.alias_size_in_bytes == (
            nbytes(state.kept) if name.startswith("write") else 0
        ), name
        assert memory.temp_size_in_bytes < nbytes(state.kept[0]) / 10, name
    engine.close()


@pytest.mark.parametrize("spec", [STATES, CONVOLUTIONS], ids=["gated delta", "convolutions"])
def test_states_are_read_and_moved_bit_for_bit(spec: ModelSpec) -> None:
    """Two shards have the heads of a state; other slots and lanes stay as they were."""
    store = Store(spec, MeshSpec(data=2, tensor=2))
    numbers = slot_bytes(spec) // 4 // 2 // 2  # of one head, in one of two layers
    k = np.random.default_rng(1).normal(size=(2, 1, 2, numbers)).astype(np.float32)
    segment = KVSegment(1, 0, k)
    store.write(1, [1], segment)
    check_equal_segments(store.read(1, 1, [1]), segment)
    assert not store.read(1, 1, [0]).k.any() and not store.read(0, 1, [1]).k.any()
    other = Store(spec, MeshSpec(tensor=2))
    moved = other.pages.move_pages(1, store.pages.read_pages(1, 1, [1]))
    other.pages.write_pages(0, 1, [0], moved)
    check_equal_segments(other.read(0, 1, [0]), segment)


def test_a_state_that_arrives_is_what_a_step_reads() -> None:
    """Numbers of a head are those of the convolution's inputs, then those of its matrices."""
    store = Store(STATES, MeshSpec())
    written = np.arange(2 * 2 * (3 * 32 + 2 * 8 * 8), dtype=np.float32).reshape(2, 1, 2, -1)
    store.write(0, [1], KVSegment(1, 0, written))
    layer = store.pages._state.current.kept[2]
    inputs = np.asarray(layer.inputs)[0, 1].transpose(1, 0, 2).reshape(2, -1)
    memory = np.asarray(layer.memory)[0, 1].reshape(2, -1)
    np.testing.assert_array_equal(np.concatenate([inputs, memory], axis=1), written[1, 0])


@pytest.mark.parametrize("count", [0, 2])
def test_a_segment_has_one_state(count: int) -> None:
    store = Store(STATES, MeshSpec())
    with pytest.raises(EngineError, match=rf"keys \[2, {count}, 2, 224\] and no values; the model"):
        store.pages.check_segment(KVSegment(1, 3, np.zeros((2, count, 2, 224), np.float32)))


def test_states_are_written_in_place() -> None:
    options = replace(BASE, page_size=16, cache_tokens=2**16, page_exchange=True)
    engine, runner = make_engine(replace(options, snapshot_share=0.9), spec=STATES)
    kept = runner.lowering.state.kept
    for name in ("read 1 pages of group 1", "write 1 pages of group 1 from float32"):
        memory = runner.lowering.page_programs()[name].compile().memory_analysis()
        held = nbytes((kept[0], kept[2])) if name.startswith("write") else 0
        assert memory.alias_size_in_bytes == held, name
        assert memory.temp_size_in_bytes < nbytes(kept[0]) / 10, name
    engine.close()


def test_an_engine_that_exchanges_none_compiles_none() -> None:
    engine, runner = make_engine(BASE)
    assert not runner.lowering.page_programs() and not runner.lowering.page_io.transit_bytes
    engine.close()


def test_memory_is_planned_for_what_is_on_its_way() -> None:
    """Memory is reserved for four segments of 512 tokens, or of a sequence, in the widest dtype."""
    store = Store(SPEC, MeshSpec(tensor=2), kv="int8")
    tokens = 4 * SIZE
    assert store.io.transit_bytes == 4 * 2 * tokens * 2 * 1 * 8 * 4, (
        "segments, layers, k and v, heads of a shard"
    )
