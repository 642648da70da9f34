"""An implementation is chosen by name or by platform, and never replaced by another one."""

from collections.abc import Callable
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta import api as gated_delta
from jaxserve.pallas_kernels.grouped_matmul import api as grouped
from jaxserve.pallas_kernels.paged_attention.api import Demand, Layout, Options
from jaxserve.pallas_kernels.quantized_matmul import api as quantized

type Product = tuple[grouped.Options, grouped.Demand]

STEP = (
    Options(Layout(2, 64, 16, jnp.dtype("float32")), 1.0),
    Demand(4, 8, 10, jnp.dtype("float32"), "some chip"),
)
PRODUCT = (
    grouped.Options(16, jnp.dtype("bfloat16")),
    grouped.Demand(64, 4, 2, 256, 256, jnp.dtype("bfloat16"), "some chip"),
)
WEIGHT = (
    quantized.Options("some chip"),
    quantized.Demand(256, (2, 256), 128, jnp.dtype("bfloat16")),
)

STATES = gated_delta.Options("some chip"), gated_delta.Demand(16, 3, 128, 128, 4)


def fake_implementation(most_rows: int) -> SimpleNamespace:
    def check(options: Options, demand: Demand) -> None:
        if demand.rows > most_rows:
            raise KernelError(f"{demand.rows} rows are more than {most_rows}")

    return SimpleNamespace(check=check)


def products(*asked: Product) -> Callable[[grouped.GroupedMatmul], list[Product]]:
    return lambda implementation: list(asked)


@pytest.mark.parametrize("platform", dispatch.CANDIDATES)
def test_every_candidate_exists(platform: str) -> None:
    assert set(dispatch.CANDIDATES[platform]) <= set(dispatch.IMPLEMENTATIONS)
    assert dispatch.choose("auto", platform, [STEP]) in dispatch.CANDIDATES[platform]


@pytest.mark.parametrize("platform", dispatch.GROUPED_CANDIDATES)
def test_every_candidate_for_grouped_products_exists(platform: str) -> None:
    assert set(dispatch.GROUPED_CANDIDATES[platform]) <= set(dispatch.GROUPED)
    assert (
        dispatch.choose_grouped("auto", platform, products(PRODUCT))
        in dispatch.GROUPED_CANDIDATES[platform]
    )


def test_grouped_products_are_chosen_as_attention_is() -> None:
    said: list[str] = []
    ragged = PRODUCT[0], PRODUCT[1]._replace(columns=90)
    chosen = dispatch.choose_grouped(
        "auto", "gpu", products(PRODUCT, ragged), lambda *refused: said.append(refused[0])
    )
    assert (chosen, said) == ("reference", ["gpu"])
    with pytest.raises(KernelError, match="40 rows cannot be cut into blocks of 16"):
        dispatch.choose_grouped(
            "reference", "cpu", products((PRODUCT[0], PRODUCT[1]._replace(rows=40)))
        )
    with pytest.raises(
        KernelError, match=r"grouped-matmul 'dense' is not built in; .* \(--grouped-matmul\)"
    ):
        dispatch.choose_grouped("dense", "cpu", products(PRODUCT))


def test_experts_in_4_bits_are_the_references_on_a_gpu() -> None:
    """Experts in 8 bits are the kernel's; a name is that implementation or an error."""
    said: list[str] = []
    int8, int4 = (
        (PRODUCT[0], PRODUCT[1]._replace(numbers=jnp.dtype(name), scales=1))
        for name in ("int8", "int4")
    )
    chosen = dispatch.choose_grouped(
        "auto", "gpu", products(int4), lambda name, error: said.append(f"{name}: {error}")
    )
    assert chosen == "reference" and "gpu: weights of int4 with 1 scales of a column" in said[0]
    assert dispatch.choose_grouped("auto", "gpu", products(int8)) == "gpu"
    with pytest.raises(KernelError, match=r"--weights int8 or fp8, or --grouped-matmul reference"):
        dispatch.choose_grouped("gpu", "gpu", products(int4))
    assert dispatch.choose_grouped("auto", "tpu", products(int4)) == "tpu"


@pytest.mark.parametrize("platform", dispatch.QUANTIZED_CANDIDATES)
def test_every_candidate_for_quantized_products_exists(platform: str) -> None:
    assert set(dispatch.QUANTIZED_CANDIDATES[platform]) <= set(dispatch.QUANTIZED)
    assert (
        dispatch.choose_quantized("auto", platform, WEIGHT)
        == dispatch.QUANTIZED_CANDIDATES[platform][0]
    )


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_quantized_products_that_no_kernel_takes_are_the_references(platform: str) -> None:
    said: list[str] = []
    exact = WEIGHT[0], WEIGHT[1]._replace(dtype=jnp.dtype("float32"))
    chosen = dispatch.choose_quantized(
        "auto", platform, exact, lambda name, error: said.append(f"{name}: {error}")
    )
    assert chosen == "reference" and said[0].startswith(f"{platform}: activations of float32")
    with pytest.raises(
        KernelError, match=r"activations of float32: .* --quantized-matmul reference\)"
    ):
        dispatch.choose_quantized(platform, platform, exact)


@pytest.mark.parametrize("platform", dispatch.RECURRENCE_CANDIDATES)
def test_every_candidate_for_recurrent_states_exists(platform: str) -> None:
    assert set(dispatch.RECURRENCE_CANDIDATES[platform]) <= set(dispatch.RECURRENCES)
    assert (
        dispatch.choose_recurrence("auto", platform, [STATES])
        == dispatch.RECURRENCE_CANDIDATES[platform][0]
    )


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_states_that_no_kernel_takes_are_the_references(platform: str) -> None:
    said: list[str] = []
    narrow = STATES[0], STATES[1]._replace(v=64)
    chosen = dispatch.choose_recurrence(
        "auto", platform, [narrow], lambda name, error: said.append(f"{name}: {error}")
    )
    assert chosen == "reference" and said[0].startswith(f"{platform}: states of 128 x 64 numbers")
    with pytest.raises(KernelError, match=r"states of 128 x 64 .*\(--recurrence reference\)"):
        dispatch.choose_recurrence(platform, platform, [narrow])
    with pytest.raises(KernelError, match=r"recurrence 'gpu' runs on 'gpu', and this is 'cpu'"):
        dispatch.choose_recurrence("gpu", "cpu", [STATES])
    assert dispatch.choose_recurrence("reference", platform, [STATES]) == "reference"


@pytest.fixture
def fake_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = {
        "small": fake_implementation(4),
        "large": fake_implementation(8),
        "reference": fake_implementation(100),
    }
    built_in["odd"] = fake_implementation(100)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", built_in)
    monkeypatch.setattr(
        dispatch, "CANDIDATES", {"gpu": ("small", "reference"), "tpu": ("small", "large")}
    )
    monkeypatch.setattr(dispatch, "PLATFORMS", {"odd": "gpu"})


def steps_with_rows(count: int) -> list[tuple[Options, Demand]]:
    return [STEP, (STEP[0], STEP[1]._replace(rows=count))]


@pytest.mark.usefixtures("fake_implementations")
def test_auto_is_the_first_of_the_platform_that_takes_every_step() -> None:
    assert dispatch.choose("auto", "tpu", steps_with_rows(8)) == "large"
    assert dispatch.choose("auto", "gpu", steps_with_rows(8)) == "reference"
    assert dispatch.choose("auto", "gpu", [(STEP[0], STEP[1]._replace(rows=4))]) == "small"


@pytest.mark.usefixtures("fake_implementations")
def test_auto_says_what_it_passes_over() -> None:
    said: list[str] = []
    dispatch.choose(
        "auto", "gpu", steps_with_rows(8), lambda name, error: said.append(f"{name}: {error}")
    )
    assert said == ["small: 8 rows are more than 4"]


@pytest.mark.usefixtures("fake_implementations")
def test_auto_says_why_nothing_will_do() -> None:
    with pytest.raises(KernelError, match="9 rows are more than 8"):
        dispatch.choose("auto", "tpu", steps_with_rows(9))
    with pytest.raises(
        KernelError, match="no attention is known to run on 'abacus'; name one of small, large"
    ):
        dispatch.choose("auto", "abacus", steps_with_rows(1))


@pytest.mark.usefixtures("fake_implementations")
def test_a_name_is_that_one_or_an_error() -> None:
    assert dispatch.choose("large", "gpu", steps_with_rows(8)) == "large"
    with pytest.raises(KernelError, match="8 rows are more than 4"):
        dispatch.choose("small", "tpu", steps_with_rows(8))
    with pytest.raises(KernelError, match="'odd' runs on 'gpu', and this is 'tpu'"):
        dispatch.choose("odd", "tpu", steps_with_rows(8))
    with pytest.raises(
        KernelError, match=r"'flash' is not built in; choose auto or one of .* \(--attention\)"
    ):
        dispatch.choose("flash", "gpu", steps_with_rows(1))
