"""The choice between XLA and the kernel of a CPU."""

import jax
import pytest

from jaxserve import LLM
from jaxserve.cli.flags import BUNDLED
from jaxserve.cpu_kernels import library
from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import INSTRUCTIONS, Library
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.errors import ConfigError
from jaxserve.loading import product
from jaxserve.loading.product import choose_product, require_use
from jaxserve.models.precision import AUTO, PRODUCTS, XLA
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.cpu_kernel import BEST, instructions

ONE = MeshSpec().build(jax.devices())
TWO = MeshSpec(tensor=2).build(jax.devices())


def has(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """Let the processor have these instructions, the best first."""
    monkeypatch.setattr(product, "load", lambda: Library(found[0]))
    monkeypatch.setattr(product, "supported", lambda: found)


def test_names_are_those_of_the_library() -> None:
    assert (AUTO, XLA, *INSTRUCTIONS) == PRODUCTS


def test_auto_takes_the_best_instructions_on_one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "avx512", "avx2")
    assert choose_product(AUTO, ONE) == CpuProduct.of("avx512")
    assert choose_product("avx2", ONE) == CpuProduct.of("avx2")
    assert choose_product(XLA, ONE) is None
    assert choose_product(AUTO, TWO) is None


def test_what_does_not_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "avx2")
    with pytest.raises(ConfigError, match=r"--product is avx512; this processor has avx2 \(choose"):
        choose_product("avx512", ONE)
    with pytest.raises(ConfigError, match="--product is avx2; it is for a mesh of one CPU; this"):
        choose_product("avx2", TWO)
    with pytest.raises(ConfigError, match="--product is sse; choose auto, xla, avx512 or avx2"):
        choose_product("sse", ONE)


def test_a_kernel_with_nothing_to_multiply_is_refused() -> None:
    instructions(BEST)
    require_use(AUTO, None)
    with pytest.raises(ConfigError, match="--product is avx2; none of the weights is in a form"):
        LLM(BUNDLED, weights="int8", product="avx2", progress=False)
    with LLM(BUNDLED, weights="int8", progress=False) as llm:
        assert llm.model.product is None


def test_without_the_library_auto_says_why_and_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Library:
        raise CpuKernelError("it was not built")

    monkeypatch.setattr(product, "load", fails)
    monkeypatch.setattr(library, "machine", lambda: "x86_64")
    assert choose_product(AUTO, ONE) is None
    assert "it was not built" in caplog.text
    caplog.clear()
    monkeypatch.setattr(library, "machine", lambda: "aarch64")  # which has none anyway
    assert choose_product(AUTO, ONE) is None
    assert not caplog.text
    with pytest.raises(ConfigError, match="--product is avx2; it was not built"):
        choose_product("avx2", ONE)
