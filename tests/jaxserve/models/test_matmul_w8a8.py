"""Products of 8-bit numbers against NumPy's float64, which is exact, on meshes and chips."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, NamedSharding, PartitionSpec

from jaxserve import LLM, SamplingParams
from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.cli.flags import BUNDLED
from jaxserve.config import EngineOptions
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.engine.build import min_rows
from jaxserve.errors import ModelError
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.layers import einsum
from jaxserve.models.matmul_w8a8 import check_chip
from jaxserve.models.quant import SCHEMES, Quantized, QuantScheme, contracted, parse_scheme
from jaxserve.models.quantize import find_scales, round_to
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.hlo.parser import parse
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh

GOLDEN = Path(__file__).parents[2] / "golden"
W8A8 = ("w8a8-int8", "w8a8-fp8")
PRODUCTS = [
    ("qkv", "DKQH", "TD,DKQH->TKQH", (128, 2, 4, 16)),
    ("down", "FD", "TF,FD->TD", (256, 48)),
]
TOKENS = 16
PROMPTS = ["What is 7 plus 5?", "Once upon a time"]


def random_quantized(
    name: str, axes: str, shape: tuple[int, ...], scheme: QuantScheme, rng: np.random.Generator
) -> Quantized:
    weight = rng.normal(0, 0.1, shape).astype(np.float32)
    at = contracted(name, axes)
    scales = find_scales(weight, at, 1, scheme.largest)
    return Quantized(
        jnp.asarray(round_to(scheme.dtype, weight, at, scales)), jnp.asarray(scales), scheme
    )


def expected_products(
    subscripts: str, x: np.ndarray, weight: Quantized
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded rows, their exact products, and the products of their absolute values."""
    scheme = weight.scheme
    wide = x.astype(np.float32)
    scales = np.abs(wide).max(axis=1, keepdims=True) * np.float32(1 / scheme.largest)
    numbers = wide * (np.float32(1) / scales)
    numbers = (np.rint(numbers) if "int8" in scheme.name else numbers).astype(scheme.dtype)
    left, right = (np.asarray(each).astype(np.float64) for each in (numbers, weight.values))
    scales = scales.reshape(-1, *(1,) * (right.ndim - 1)).astype(np.float64) * np.asarray(
        weight.scales, np.float64
    )
    sums = [
        np.einsum(subscripts, a, b) * scales for a, b in ((left, right), (abs(left), abs(right)))
    ]
    return sums[0], sums[1]


@pytest.mark.parametrize("weights", W8A8)
@pytest.mark.parametrize(("name", "axes", "subscripts", "shape"), PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 7])
def test_products(
    weights: str,
    name: str,
    axes: str,
    subscripts: str,
    shape: tuple[int, ...],
    dtype: str,
    rows: int,
) -> None:
    """Products are right to the last digits of float32; int8 whatever the terms of the sum.

    They differ from those of rounded weights alone.
    """
    rng = np.random.default_rng(5)
    weight = random_quantized(name, axes, shape, SCHEMES[weights], rng)
    x = jnp.asarray(
        rng.normal(0, 1, (rows, shape[0])) * 10.0 ** rng.integers(-3, 3, (rows, 1)), dtype
    )
    found = np.asarray(jax.jit(einsum, static_argnums=0)(subscripts, x, weight))
    exact, terms = expected_products(subscripts, np.asarray(x), weight)
    assert found.dtype == np.float32 and found.shape == exact.shape
    assert (
        np.abs(found - exact) <= 4e-7 * (np.abs(exact) if weights == "w8a8-int8" else terms)
    ).all()
    alone = Quantized(weight.values, weight.scales, SCHEMES[SCHEMES[weights].weights_alone])
    assert np.abs(found - einsum(subscripts, x, alone)).max() > 1e-4 * np.abs(exact).max()


@pytest.mark.parametrize("weights", W8A8)
def test_rows_do_not_feel_each_other(weights: str) -> None:
    """A row of zeros gives zeros; a row that is not finite affects no other row."""
    rng = np.random.default_rng(1)
    weight = random_quantized("down", "FD", (64, 16), SCHEMES[weights], rng)
    x = rng.normal(0, 1, (6, 64)).astype(np.float32)
    plain = np.asarray(einsum("TF,FD->TD", jnp.asarray(x), weight))
    x[1] = 0
    x[2, 3] = np.nan
    x[3, 4] = np.inf
    x[4] = 1e-42
    found = np.asarray(einsum("TF,FD->TD", jnp.asarray(x), weight))
    np.testing.assert_array_equal(found[[0, 5]], plain[[0, 5]])
    assert not found[1].any() and not np.isfinite(found[2:4]).any() and np.isfinite(found[4]).all()


@pytest.mark.parametrize("weights", W8A8)
def test_what_is_summed_may_be_split(weights: str) -> None:
    """A token's scale covers the whole row on every mesh.

    Sums of int8 are the same bit for bit, since shards send integers.
    """
    rng = np.random.default_rng(2)
    weight = random_quantized("down", "FD", (256, 48), SCHEMES[weights], rng)
    x = jnp.asarray(rng.normal(0, 1, (5, 256)), jnp.float32)
    one = np.asarray(jax.jit(einsum, static_argnums=0)("TF,FD->TD", x, weight))
    for tensor in (2, 4):
        mesh = MeshSpec(tensor=tensor).build(jax.devices())
        split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("tensor",), ()))
        rows = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        spread = Quantized(
            jax.device_put(weight.values, split),
            jax.device_put(weight.scales, whole),
            weight.scheme,
        )
        compiled = (
            jax.jit(einsum, static_argnums=0)
            .lower("TF,FD->TD", jax.device_put(x, rows), spread)
            .compile()
        )
        found = compiled(jax.device_put(x, rows), spread)
        module = parse(compiled.as_text() or "")
        sent = [
            i.result.partition("{")[0]
            for body in module.values()
            for i in body.values()
            if i.op == "all-reduce"
        ]
        assert sent == ["f32[5]", "s32[5,48]" if weights == "w8a8-int8" else "f32[5,48]"], (
            "scales, then sums"
        )
        np.testing.assert_allclose(found, one, rtol=0, atol=0 if weights == "w8a8-int8" else 1e-5)


@pytest.mark.parametrize("weights", [*W8A8, "w8a8-int8+head"])
def test_logits_on_meshes(weights: str) -> None:
    """Logits are close to full precision, and on two devices close to one device's.

    Numbers that are almost equal may be rounded differently.
    """
    folder = GOLDEN / "llama_gqa"
    prompts = np.random.default_rng(0).integers(0, 64, (2, 12))
    exact = Decoder(folder, one_device_mesh(), rows=2, context=32, page_size=8)(prompts, 0)
    found = []
    for tensor in (1, 2):
        mesh = MeshSpec(tensor=tensor).build(jax.devices())
        found.append(
            Decoder(folder, mesh, rows=2, context=32, page_size=8, weights=weights)(prompts, 0)
        )
    spread = np.asarray(exact).std()
    off = np.sqrt(np.mean((np.asarray(found[0]) - exact) ** 2)) / spread
    assert 1e-4 < off < (0.06 if "int8" in weights else 0.2)
    np.testing.assert_allclose(found[1], found[0], atol=0.02 * spread)


@pytest.mark.slow
@pytest.mark.parametrize("weights", W8A8)
def test_tokens_on_meshes(weights: str) -> None:
    """The bundled model's best two tokens are far enough apart in these answers."""
    found = [greedy_tokens(weights, MeshSpec(*axes)) for axes in ((1, 1, 1), (2, 1, 2))]
    assert found[0][0][:8] != found[0][1][:8] and all(each == found[0] for each in found)


def greedy_tokens(weights: str, axes: MeshSpec) -> list[tuple[int, ...]]:
    options = EngineOptions(max_batch=2, step_tokens=64, max_context=128)
    with LLM(BUNDLED, dtype="float32", weights=weights, options=options, mesh=axes) as llm:
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=0))
    return [tuple(each.token_ids) for each in done]


@pytest.mark.parametrize(
    ("chip", "weights", "problem"),
    [
        (
            "v4",
            "w8a8-int8",
            "--weights is w8a8-int8; TPU v4 does not multiply int8 numbers with each other .choose "
            "int8,",
        ),
        (
            "v6e",
            "w8a8-fp8+head",
            "w8a8-fp8.head; TPU v6 lite does not multiply fp8 numbers .* .choose fp8.head,",
        ),
        ("7x", "w8a8-int8", "TPU7x does not multiply int8"),
    ],
)
def test_chips_without_such_products(chip: str, weights: str, problem: str) -> None:
    kind = CHIPS[chip]
    mesh = MeshSpec().without_devices(AbstractDevice(kind.kind, kind.cores, kind.platform))
    with pytest.raises(ModelError, match=problem):
        check_chip(parse_scheme(weights), mesh)
    check_chip(parse_scheme(weights.removeprefix("w8a8-")), mesh)
    check_chip(parse_scheme(weights), one_device_mesh())


def test_sums_that_int32_does_not_hold() -> None:
    spec = ModelSpec("llama", 64, 64, 1, 4, 2, 16, 133_145, 1e-5, 64, Rope(1e4))
    with pytest.raises(
        ModelError, match="w8a8-int8; down sums 133145 products, more than int32 holds"
    ):
        param_specs(spec, jnp.dtype("float32"), SCHEMES["w8a8-int8"])
    param_specs(replace(spec, d_mlp=133_144), jnp.dtype("float32"), SCHEMES["w8a8-int8"])
    param_specs(spec, jnp.dtype("float32"), SCHEMES["w8a8-fp8"])


@pytest.mark.parametrize(
    ("case", "dtype", "weights", "instructions", "fewest"),
    [
        ("llama_gqa", "float32", "auto", None, 1),
        ("llama_gqa", "float32", "int8", None, 1),
        ("llama_gqa", "float32", "w8a8-int8", None, 2),
        ("llama_gqa", "bfloat16", "auto", None, 2),
        ("llama_gqa", "bfloat16", "auto", "avx2", 1),
        ("llama_gqa", "bfloat16", "w8a8-int8", "avx2", 1),
        ("llama_gqa", "bfloat16", "int8", "avx2", 2),
        ("qwen2_moe_shared_expert", "bfloat16", "auto", "avx2", 2),
        ("deepseek_v2_groups", "bfloat16", "auto", "avx2", 2),
    ],
)
def test_one_row_on_a_cpu_is_two_where_xla_multiplies(
    case: str, dtype: str, weights: str, instructions: str | None, fewest: int
) -> None:
    """XLA:CPU takes ten times as long for one row of 8-bit or bfloat16 numbers as for two."""
    spec = read_spec(HFCheckpoint.open(GOLDEN / case).config)[1]
    product = CpuProduct.of(instructions) if instructions else None
    declared = param_specs(spec, jnp.dtype(dtype), parse_scheme(weights), product)
    assert min_rows(spec, declared, one_device_mesh()) == fewest
