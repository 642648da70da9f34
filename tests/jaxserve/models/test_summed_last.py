"""Weights that a CPU's kernel multiplies: how they lie, and what they give."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.loading.spec import open_checkpoint, read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.quant import SCHEMES, Quantized
from jaxserve.models.summed_last import SummedLast, is_summed_last, product_in
from jaxserve.sharding.params import map_specs
from tests.jaxserve.cpu_kernel import BEST, KERNELS, instructions
from tests.jaxserve.loading.loaded import load_params
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh
from tests.slow_cases import slow_but

GOLDEN = Path(__file__).parents[2] / "golden"
AVX2 = CpuProduct.of("avx2")
# Dense layers with and without biases, norms of all heads, tied heads, latent attention, shared
# experts, and weights that are stored in 8 and 4 bits.
CASES = (
    *("llama_gqa", "llama_tied", "llama_mlp_bias", "olmo2_gqa", "phi3_longrope", "gemma2_caps"),
    *("qwen2_moe_shared_expert", "deepseek_v2_groups", "deepseek_v3_fp8", "gpt_oss_mxfp4"),
)
RUNS = [(case, product) for case in CASES for product in KERNELS]
QUICK = (
    *(("qwen2_moe_shared_expert", BEST), ("deepseek_v3_fp8", BEST)),
    *(("llama_tied", "avx2"), ("llama_mlp_bias", "avx2")),
)


@pytest.mark.parametrize("run", slow_but(RUNS, QUICK))
def test_logits(run: tuple[str, str]) -> None:
    """Logits of a prompt and of 8 decode steps are those of transformers."""
    case, product = run
    golden = np.load(GOLDEN / case / "golden.npz")
    prompts = golden["prompts"]
    tokens = golden["tokens"]
    asked = CpuProduct.of(instructions(product))
    decoder = Decoder(
        *(GOLDEN / case, one_device_mesh()), rows=2, context=64, page_size=8, product=asked
    )
    assert product_in(decoder.params) == asked
    np.testing.assert_allclose(decoder(prompts, 0), golden["prompt_logits"], atol=1e-4)
    for i in range(8):
        found = decoder(tokens[:, i : i + 1], prompts.shape[1] + i)[:, 0]
        np.testing.assert_allclose(found, golden["decode_logits"][:, i], atol=1e-4)


@pytest.mark.parametrize("product", slow_but(list(KERNELS), [BEST]))
def test_logits_in_bfloat16(product: str) -> None:
    golden = np.load(GOLDEN / "llama_gqa" / "golden.npz")
    prompts = golden["prompts"]
    folder = GOLDEN / "llama_gqa"
    decoder = Decoder(
        *(folder, one_device_mesh()),
        rows=2,
        context=64,
        page_size=8,
        dtype="bfloat16",
        product=CpuProduct.of(instructions(product)),
    )
    assert np.median(np.abs(decoder(prompts, 0) - golden["prompt_logits"])) < 0.1
    decoded = decoder(golden["tokens"][:, :1], prompts.shape[1])[:, 0]
    assert np.median(np.abs(decoded - golden["decode_logits"][:, 0])) < 0.2


@pytest.mark.parametrize("product", slow_but(list(KERNELS), [BEST]))
def test_8_bit_products_are_those_of_xla(product: str) -> None:
    """Sums in int32 are exact, and so are the logits the same bit for bit."""
    golden = np.load(GOLDEN / "llama_gqa" / "golden.npz")
    found = []
    for each in (None, CpuProduct.of(instructions(product))):
        decoder = Decoder(
            *(GOLDEN / "llama_gqa", one_device_mesh()),
            rows=2,
            context=64,
            page_size=8,
            weights="w8a8-int8+head",
            product=each,
        )
        decoder(golden["prompts"], 0)
        found.append(decoder(golden["tokens"][:, :1], golden["prompts"].shape[1]))
    by_xla, by_kernel = found
    np.testing.assert_array_equal(by_kernel, by_xla)


@pytest.mark.parametrize("weights", ["auto", "w8a8-int8"])
def test_numbers_lie_as_in_checkpoints(weights: str) -> None:
    """A loaded weight has the numbers of the declared order, with summed dimensions last."""
    checkpoint = open_checkpoint(GOLDEN / "llama_gqa")
    mesh = one_device_mesh()
    declared = load_params(checkpoint, mesh, weights=weights)["layers"][0]
    held = load_params(checkpoint, mesh, weights=weights, product=AVX2)["layers"][0]
    turns = {"qkv": (1, 2, 3, 0), "o": (2, 0, 1), "gate_up": (1, 2, 0), "down": (1, 0)}
    for name, order in turns.items():
        found = held[name].weight
        expected = declared[name]
        if isinstance(expected, Quantized):
            assert isinstance(found, Quantized)
            columns = found.values.ndim - held[name].summed
            assert found.scales.shape == (*found.values.shape[:columns], 1)
            assert found.scales.ravel().tolist() == np.asarray(expected.scales).ravel().tolist()
            found, expected = found.values, expected.values
        np.testing.assert_array_equal(found, np.transpose(expected, order))


def declared(case: str, scheme: str | None = None) -> dict[str, Any]:
    spec = read_spec(HFCheckpoint.open(GOLDEN / case).config)[1]
    return param_specs(spec, np.dtype(np.float32), SCHEMES[scheme] if scheme else None, AVX2)


def test_axes_that_are_declared_for_the_kernel() -> None:
    layer = declared("llama_gqa")["layers"][0]
    found = {name: (leaf.weight.axes, leaf.summed) for name, leaf in layer.items() if turned(leaf)}
    assert found == {
        "qkv": ("KQHD", 1),
        "o": ("DNH", 2),
        "gate_up": ("CFD", 1),
        "down": ("DF", 1),
    }


def turned(leaf: object) -> bool:
    return isinstance(leaf, SummedLast)


def test_weights_that_are_widened_and_experts_stay_as_they_are() -> None:
    widened = declared("llama_gqa", "int8")
    assert [name for name, leaf in widened["layers"][0].items() if turned(leaf)] == []
    assert turned(widened["head"])
    fp8 = declared("llama_gqa", "w8a8-fp8")
    assert [name for name, leaf in fp8["layers"][0].items() if turned(leaf)] == []
    mixture = declared("qwen2_moe_shared_expert")["layers"][0]
    assert turned(mixture["qkv"])
    nested = [mixture["experts"], mixture["shared"]]
    assert not any(map(turned, jax.tree.leaves(nested, is_leaf=is_summed_last)))


def test_the_order_changes_no_size() -> None:
    """What is declared for the kernel has as many numbers as what is declared for XLA."""
    spec = read_spec(HFCheckpoint.open(GOLDEN / "deepseek_v2_groups").config)[1]
    sizes = [
        sorted(
            jax.tree.leaves(
                map_specs(lambda p: p.nbytes, param_specs(spec, np.dtype(np.float32), None, each))
            )
        )
        for each in (None, AVX2)
    ]
    assert sizes[0] == sizes[1]
