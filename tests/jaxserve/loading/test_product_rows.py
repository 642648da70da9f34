"""How many rows a CPU's kernel multiplies: what is measured, kept, and left as committed."""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, EngineOptions
from jaxserve.cli.flags import BUNDLED
from jaxserve.compilation_cache import keep_record
from jaxserve.cpu_kernels.processor import Processor
from jaxserve.cpu_kernels.products import CpuProduct, MaxRows
from jaxserve.loading import product_rows
from jaxserve.loading.load_plan import LoadPlan, plan_load
from jaxserve.loading.product_rows import (
    LEAST_BYTES,
    ROWS,
    DisturbedError,
    Race,
    Shape,
    kept_rows,
    key_of,
    largest_weight,
    measured,
    most_rows,
)
from jaxserve.loading.spec import open_checkpoint, read_architecture
from jaxserve.models.summed_last import is_summed_last, product_in
from tests.jaxserve.cpu_kernel import BEST, instructions
from tests.jaxserve.models.decoder_harness import one_device_mesh

GOLDEN = Path(__file__).parents[2] / "golden"
SHAPE = Shape("bfloat16", columns=640, summed=256)


def plan(case: str, product: CpuProduct | None, weights: str = "auto") -> LoadPlan:
    source = read_architecture(open_checkpoint(GOLDEN / case))
    return plan_load(source, one_device_mesh(), "bfloat16", weights, product)


@pytest.fixture
def product() -> CpuProduct:
    return CpuProduct.of(instructions(BEST))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Let jax keep compiled steps in a folder of the test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def race_until(limit: int, asked: list[int]) -> Callable[[Shape, str], Callable[[int], bool]]:
    """Return a race in which the kernel is faster up to `limit` rows."""

    def is_faster(rows: int) -> bool:
        asked.append(rows)
        return rows <= limit

    return lambda shape, instructions: is_faster


@pytest.mark.parametrize("limit", [0, *ROWS, 1000])
def test_rows_are_found_by_halving(limit: int) -> None:
    asked: list[int] = []
    found = most_rows(race_until(limit, asked)(SHAPE, ""))
    assert found == min(max(limit, 1), ROWS[-1])
    assert len(asked) <= 3


def test_the_largest_weight_of_a_layer_is_measured(product: CpuProduct) -> None:
    """Of llama_gqa that is gate and up together; the head is not a layer's."""
    found = largest_weight(plan("llama_gqa", product))
    spec = plan("llama_gqa", product).held
    assert found is not None
    assert found.numbers == "bfloat16"
    assert found.columns % 2 == 0
    assert found.summed == spec.d_model
    narrow = largest_weight(plan("llama_gqa", product, "w8a8-int8"))
    assert narrow is not None
    assert narrow.numbers == "int8"
    assert largest_weight(plan("llama_gqa", None)) is None


def test_what_is_measured_is_kept_and_every_weight_has_it(
    product: CpuProduct, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(product_rows, "LEAST_BYTES", 1)
    monkeypatch.setattr(product_rows, "Race", race_until(16, asked))
    given = plan("llama_gqa", product)
    found = measured(given, product)
    assert found.max_rows == product.max_rows._replace(bfloat16=16)
    assert found.is_measured
    assert asked
    asked.clear()
    assert measured(given, product) == found
    assert not asked
    assert products_in(given.multiplied_by(found)) == ({found}, {found})
    assert products_in(given) == ({product}, {product})


def products_in(plan: LoadPlan) -> tuple[set[CpuProduct], set[CpuProduct]]:
    """Return the products of the declared tree, and those of the parameters' plans."""
    leaves = jax.tree.leaves(plan.declared, is_leaf=is_summed_last)
    declared = [plan.declared for plan in plan.parameters]
    in_tree, in_plans = (
        {leaf.product for leaf in each if is_summed_last(leaf)} for each in (leaves, declared)
    )
    return in_tree, in_plans


def test_what_cannot_be_kept_is_not_used(
    product: CpuProduct, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start would find other rows, and choose other tokens."""
    monkeypatch.setattr(product_rows, "LEAST_BYTES", 1)
    monkeypatch.setattr(product_rows, "Race", race_until(16, []))
    jax.config.update("jax_compilation_cache_dir", str(folder / "missing"))
    assert measured(plan("llama_gqa", product), product) == product


def test_what_another_process_has_kept_meanwhile_counts(
    product: CpuProduct, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_rows, "LEAST_BYTES", 1)
    monkeypatch.setattr(product_rows, "Race", race_until(16, []))
    monkeypatch.setattr(product_rows, "keep_record", lambda key, text: keep_record(key, "64"))
    assert measured(plan("llama_gqa", product), product).max_rows.bfloat16 == 64


def test_another_processor_shape_or_jaxlib_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keys() -> set[str]:
        shapes = SHAPE, SHAPE._replace(numbers="int8"), SHAPE._replace(summed=512)
        return {key_of(shape, name) for shape in shapes for name in ("avx512", "avx2")}

    found = keys()
    monkeypatch.setattr(product_rows, "processor", lambda: Processor("another", frozenset(), 2))
    found |= keys()
    monkeypatch.setattr(product_rows, "version", lambda package: "another")
    found |= keys()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    found |= keys()
    assert len(found) == 24


@pytest.mark.parametrize("text", ["", "many", "-1", "0", "47", "9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_a_damaged_record_is_none(folder: Path, text: str) -> None:
    keep_record("a key", text)
    assert kept_rows("a key") is None
    keep_record("a key", "32")
    assert kept_rows("a key") == 32
    assert kept_rows("another") is None


def test_a_disturbed_measurement_is_not_kept(
    product: CpuProduct,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def disturbed(rows: int) -> bool:
        raise DisturbedError("they were not steady")

    monkeypatch.setattr(product_rows, "LEAST_BYTES", 1)
    monkeypatch.setattr(product_rows, "Race", lambda shape, instructions: disturbed)
    given = plan("llama_gqa", product)
    with caplog.at_level(logging.INFO, "jaxserve.engine"):
        assert measured(given, product) == product
    assert "were not measured: they were not steady" in caplog.text
    assert not list(folder.iterdir())


class Clock:
    """A clock on which every other pass takes a time of its own, and readings between take none.

    Args:
        passes: Seconds of the passes, over and over again.
    """

    def __init__(self, *passes: float):
        self._passes = itertools.cycle(passes)
        self._now = 0.0
        self.passes = 0

    def __call__(self) -> float:
        return self._now

    def run(self, product: object, x: object) -> float:
        """Let a pass take its time."""
        taken = next(self._passes)
        self._now += taken
        self.passes += 1
        return taken


def race_on(clock: Clock, product: CpuProduct, monkeypatch: pytest.MonkeyPatch) -> Race:
    race = Race(SHAPE, product.instructions, clock)
    monkeypatch.setattr(race, "_pass", clock.run)
    return race


def test_the_faster_product_wins(product: CpuProduct, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.010, 0.012)
    assert race_on(clock, product, monkeypatch)(16)
    assert clock.passes == 2 * (1 + product_rows.PASSES)
    assert not race_on(Clock(0.012, 0.010), product, monkeypatch)(16)


def test_a_race_goes_on_until_it_is_steady(
    product: CpuProduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is disturbed twice; one slow pass of seven disturbs nothing."""
    clock = Clock(*(0.010, 0.012), *(0.030, 0.012) * 2, *(0.010, 0.012) * 20)
    assert race_on(clock, product, monkeypatch)(16)
    assert clock.passes > 2 * (1 + product_rows.PASSES)


def test_a_race_ends_in_time(product: CpuProduct, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.010, 0.012, 0.020, 0.024)
    with pytest.raises(DisturbedError, match="they were not steady for 3 s"):
        race_on(clock, product, monkeypatch)(16)
    assert clock() < 3.1


def test_a_race_runs_both_products(product: CpuProduct, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of readings, both take one tick."""
    ran: list[str] = []
    for name in ("multiply", "contract"):
        whole = getattr(product_rows, name)

        def noted(*args: Any, name: str = name, whole: Any = whole) -> jax.Array:
            ran.append(name)
            return whole(*args)

        monkeypatch.setattr(product_rows, name, noted)
    ticks = itertools.count()
    assert not Race(SHAPE, product.instructions, lambda: next(ticks) / 1000)(16)
    assert ran == ["multiply", "contract"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (EngineOptions(), True),
        (EngineOptions(deterministic=True), False),
        (EngineOptions(page_exchange=True), False),
    ],
)
def test_an_llm_measures_unless_others_depend_on_its_bits(
    options: EngineOptions, asked: bool, product: CpuProduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(product, max_rows=MaxRows(1, 2, 3), is_measured=True)
    monkeypatch.setattr("jaxserve.loading.folder.measured", lambda plan, product: found)
    with LLM(BUNDLED, options=options, progress=False) as llm:
        expected = found if asked else product
        assert llm.model.product == product_in(llm.model.params) == expected
        assert ("up to 1 rows, as measured" in llm.model.product_text) == asked
    with LLM(BUNDLED, options=options, product=product.instructions, progress=False) as llm:
        assert llm.model.product == product  # which was named


def test_the_bundled_model_is_too_small_to_be_measured(
    product: CpuProduct, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_rows, "LEAST_BYTES", LEAST_BYTES)
    monkeypatch.setattr(product_rows, "Race", race_until(8, []))
    source = read_architecture(open_checkpoint(BUNDLED))
    given = plan_load(source, one_device_mesh(), product=product)
    assert measured(given, product) == product
    assert not list(folder.iterdir())
