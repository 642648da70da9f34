"""Quantized mixtures of experts, compared with tensors that NumPy rounds along their inputs."""

import json
import re
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.checkpoints.quantized import dequantized
from jaxserve.loading.spec import read_spec
from jaxserve.models import quantize
from jaxserve.models.decoder import param_specs
from jaxserve.models.mixture import Mixture
from jaxserve.models.moe import Experts
from jaxserve.models.moe_sizes import kernel_demands
from jaxserve.models.quant import SCHEMES, Quantized, contracted
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.grouped_matmul import reference
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh
from tests.jaxserve.models.test_moe import TOKENS, naive_mixture
from tests.jaxserve.models.test_quant import (
    STEPS,
    WEIGHTS_ALONE,
    dequantized_weight,
    load,
    named_parameters,
    rounded_rows,
)
from tests.slow_cases import slow_but

GOLDEN = Path(__file__).parents[2] / "golden"
BOUND = 3e-4  # of logits around 5: numbers are multiplied by their scale after they are summed up
# Sizes with which every sum, on two devices too, is of a multiple of 128 numbers.
WIDE = {
    "mixtral_gqa": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64},
    "qwen2_moe_shared_expert": {"hidden_size": 256, "moe_intermediate_size": 256}
    | {"shared_expert_intermediate_size": 256, "intermediate_size": 256},
    "deepseek_v3_legacy": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
    }
    | {"q_lora_rank": 128, "v_head_dim": 64},
    "gpt_oss_head_dim": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64},
}
KINDS = {"qkv", "o", "gate_up", "down"}
LATENT = KINDS - {"qkv"} | {"compress", "query"}
# What is rounded of a checkpoint: of latent attention not the matrix that makes keys and values.
OF_INPUTS = re.compile(r"(?<!kv_b)_proj(_with_mqa)?(\.weight)?$|\.experts\.\d+\.w[123]\.weight$")
BY_EXPERT = re.compile(r"\.experts\.(gate_up|down)_proj$")  # [E, inputs, outputs]


@pytest.fixture(scope="session")
def wide_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints of four families."""
    found = dict[str, Path]()
    draw = np.random.default_rng(3)
    for case, sizes in WIDE.items():
        folder = found[case] = tmp_path_factory.mktemp(case)
        config = json.loads((GOLDEN / case / "config.json").read_text()) | sizes
        (folder / "config.json").write_text(json.dumps(config))
        family, spec = read_spec(config)
        rows = {row.name: row.shape(spec.sizes(row.block)) for row in family.tensors(spec)}
        tensors = {
            name: draw.normal(name.endswith("norm.weight"), 0.1, shape)
            for name, shape in rows.items()
        }
        save_file(
            {n: tensor.astype(np.float32) for n, tensor in tensors.items()},
            folder / "model.safetensors",
        )
    return found


def rounded_checkpoint(folder: Path, weights: str, target: Path) -> Path:
    """Write a folder with the numbers that the quantized weights stand for, in float32."""
    checkpoint = HFCheckpoint.open(folder)
    config = {
        name: value for name, value in checkpoint.config.items() if name != "quantization_config"
    }
    stored = dequantized(checkpoint.tensors, checkpoint.config)
    tensors = {
        n: np.asarray(t[(slice(None),) * len(t.shape)]).astype(np.float32)
        for n, t in stored.items()
    }
    for name, tensor in tensors.items():
        if BY_EXPERT.search(name):
            turned = np.ascontiguousarray(tensor.swapaxes(1, 2))
            rows = rounded_rows(turned.reshape(-1, turned.shape[2]), weights).reshape(turned.shape)
            tensors[name] = np.ascontiguousarray(rows.swapaxes(1, 2))
        elif OF_INPUTS.search(name):
            tensors[name] = rounded_rows(tensor, weights)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


# Every family and every scheme.
QUICK = [
    *(("mixtral_gqa", "int4-g128"), ("mixtral_gqa", "int8"), ("qwen2_moe_shared_expert", "fp8")),
    *(("deepseek_v3_legacy", "int4"), ("deepseek_v3_legacy", "int4-g64")),
    ("gpt_oss_head_dim", "int4-g32"),
]


@pytest.mark.parametrize("both", slow_but(list(product(WIDE, WEIGHTS_ALONE)), QUICK))
def test_numbers_times_scales_are_the_rounded_checkpoint(
    both: tuple[str, str], wide_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Weights are equal bit for bit, and within half a step of the source."""
    case, weights = both
    folder = wide_checkpoints[case]
    plain = load(folder)
    quantized = load(folder, weights)
    whole = (
        named_parameters(load(rounded_checkpoint(folder, weights, tmp_path)), folder),
        named_parameters(plain, folder),
    )
    kinds = set[str]()
    for (name, weight, axes), (_, rounded, _), (_, exact, _) in zip(
        named_parameters(quantized, folder), *whole, strict=True
    ):
        if not isinstance(weight, Quantized):
            np.testing.assert_array_equal(weight, exact)
            continue
        kinds.add(name)
        found = dequantized_weight(name, weight, axes)
        exact = np.asarray(exact)
        np.testing.assert_array_equal(found, rounded)
        assert (
            0 < np.abs(found - exact).max() <= np.abs(exact).max() / STEPS[weights[:4]] / 2 * 1.0001
        )
    assert kinds == (LATENT if "deepseek" in case else KINDS)
    last = quantized["layers"][-1]
    assert all(isinstance(last["experts"][name], Quantized) for name in ("gate_up", "down"))
    assert not isinstance(last["router"], Quantized)


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("mixtral_gqa", "int4-g64"),
        pytest.param("mixtral_gqa", "int8", marks=pytest.mark.slow),
        pytest.param("qwen2_moe_shared_expert", "fp8", marks=pytest.mark.slow),
        pytest.param("deepseek_v3_legacy", "int4", marks=pytest.mark.slow),
        pytest.param("deepseek_v3_legacy", "int4-g32", marks=pytest.mark.slow),
        pytest.param("gpt_oss_head_dim", "int4-g128", marks=pytest.mark.slow),
    ],
)
def test_logits(case: str, weights: str, wide_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check_logits(wide_checkpoints[case], weights, tmp_path)


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("gpt_oss_mxfp4", "int4-g32"),
        pytest.param("deepseek_v3_fp8", "int8", marks=pytest.mark.slow),
        pytest.param("qwen3_moe_tied", "fp8", marks=pytest.mark.slow),
    ],
)
def test_logits_of_checkpoints_that_are_quantized_themselves(
    case: str, weights: str, tmp_path: Path
) -> None:
    """Checkpoints quantized in blocks and groups are dequantized first; one has a tied head."""
    check_logits(GOLDEN / case, weights, tmp_path)


def check_logits(folder: Path, weights: str, target: Path) -> None:
    prompts = np.random.default_rng(0).integers(0, 96, (2, 12))
    mesh = MeshSpec(tensor=2).build(jax.devices())
    quantized = Decoder(folder, mesh, rows=2, context=32, page_size=8, weights=weights)
    plain = Decoder(
        rounded_checkpoint(folder, weights, target),
        one_device_mesh(),
        rows=2,
        context=32,
        page_size=8,
    )
    np.testing.assert_allclose(quantized(prompts, 0), plain(prompts, 0), atol=BOUND)
    np.testing.assert_allclose(quantized(prompts[:, :1], 12), plain(prompts[:, :1], 12), atol=BOUND)


@pytest.mark.parametrize("axes", slow_but([(1, 4, 2), (1, 8, 1), (2, 1, 2)], [(1, 4, 2)]))
@pytest.mark.parametrize(
    ("case", "weights"),
    [("mixtral_gqa", "int4-g128"), ("gpt_oss_head_dim", "int8"), ("deepseek_v3_legacy", "fp8")],
)
def test_shards_hold_what_one_device_holds(
    case: str,
    weights: str,
    axes: tuple[int, int, int],
    wide_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards are equal bit for bit, in however many parts each was read."""
    one = load(wide_checkpoints[case], weights)
    monkeypatch.setattr(quantize, "MAX_NUMBERS", 5000)
    spread = load(wide_checkpoints[case], weights, MeshSpec(*axes).build(jax.devices()))
    down = spread["layers"][1]["experts"]["down"].values
    assert down.sharding.shard_shape(down.shape) == (8 // axes[1], 256 // axes[2], 128)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(spread), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(
            np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
        )


def test_a_piece_is_of_one_expert_before_it_is_a_part_of_one(
    wide_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are cut between experts first: each has its own tensors, read once for a part."""
    asked = tuple(map(range, (8, 2, 128, 256)))
    at = contracted("gate_up", "ECDF")
    for size, expected in [
        (2**20, (8, 2, 128, 256)),
        (2**17, (2, 2, 128, 256)),
        (2**16, (1, 2, 128, 256)),
    ]:
        monkeypatch.setattr(quantize, "MAX_NUMBERS", size)
        assert {tuple(map(len, piece)) for piece, _ in quantize._parts(asked, at)} == {expected}
    monkeypatch.setattr(quantize, "MAX_NUMBERS", 2**13)
    covered = np.zeros((8, 2, 128, 256), int)
    for piece, place in quantize._parts(asked, at):
        assert tuple(map(len, piece)) == (1, 1, 128, 64)
        assert [part.start for part in piece] == [part.start or 0 for part in place]
        covered[place] += 1
    assert (covered == 1).all()


# ---- the layer alone


MIXTURE = Mixture(experts=8, taken=2, d_expert=512, layers=(0,), d_shared=512, shared_gate=True)
SPEC = ModelSpec("test", 32, 128, 1, 4, 4, 32, 64, 1e-5, 64, mixture=MIXTURE)


def quantized_layer(weights: str, mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
    """Return a layer's quantized experts, shared MLP and router, and what they stand for."""
    draw = np.random.default_rng(3)
    scheme = SCHEMES[weights]
    declared = param_specs(SPEC, jnp.dtype("float32"), scheme)["layers"][0]
    places = param_specs(SPEC, jnp.dtype("float32"))["layers"][0]

    def place(name: str, param: Quantized, axes: str) -> tuple[Quantized, np.ndarray]:
        weight = draw.normal(0, 0.5, param.values.shape).astype(np.float32)
        at = contracted(name, axes)
        scales = quantize.find_scales(weight, at, param.scales.shape[at.start], scheme.largest)
        numbers = quantize.round_to(scheme.dtype, weight, at, scales)
        held = Quantized(
            jax.device_put(numbers, param.values.sharding(mesh)),
            jax.device_put(scales, param.scales.sharding(mesh)),
            scheme,
        )
        return held, dequantized_weight(name, held, axes)

    held = dict(declared)
    exact = dict(declared)
    for block in ("experts", "shared"):
        pairs = {
            name: place(name, param, places[block][name].axes)
            for name, param in declared[block].items()
        }
        held[block], exact[block] = (
            {name: pair[i] for name, pair in pairs.items()} for i in range(2)
        )
    for name in ("router", "shared_gate"):
        exact[name] = draw.normal(0, 0.5, declared[name].shape).astype(np.float32)
        held[name] = jax.device_put(exact[name], declared[name].sharding(mesh))
    names = ("experts", "shared", "router", "shared_gate")
    return {name: held[name] for name in names}, {name: exact[name] for name in names}


def test_what_is_asked_of_a_kernel() -> None:
    """A demand has the dtype of numbers, and the scales of each column of a shard."""
    mesh = MeshSpec(expert=2, tensor=4).build(jax.devices())
    dtype = jnp.dtype("bfloat16")
    asked = {
        scheme: kernel_demands(SPEC, 16, mesh, reference, dtype, SCHEMES.get(scheme))
        for scheme in ("", "int8", "int4-g32")
    }
    assert [(up.numbers, up.scales, down.scales) for (_, up), (_, down) in asked.values()] == [
        (None, 0, 0),
        (jnp.int8, 1, 1),
        (jnp.int4, 128 // 32, 512 // 4 // 32),
    ]


@pytest.mark.parametrize("axes", slow_but([(1, 1, 1), (1, 4, 2), (2, 1, 4)], [(1, 4, 2)]))
@pytest.mark.parametrize("weights", slow_but(WEIGHTS_ALONE, ("int8", "fp8", "int4-g64")))
def test_every_token_gets_its_experts_answers(weights: str, axes: tuple[int, int, int]) -> None:
    """Answers are those of float64 with the numbers that the weights stand for."""
    mesh_spec = MeshSpec(*axes)
    mesh = mesh_spec.build(jax.devices())
    held, exact = quantized_layer(weights, mesh)
    draw = np.random.default_rng(0)
    count = TOKENS * mesh_spec.lanes
    x = draw.standard_normal((count, SPEC.d_model)).astype(np.float32)
    live = draw.random(count) < 0.9
    out, _ = jax.jit(lambda w, x: Experts(jnp.asarray(live), SPEC, mesh, reference)(w, x))(
        held, jnp.asarray(x)
    )
    expected, _ = naive_mixture(MIXTURE, exact, x, live)
    np.testing.assert_allclose(out, expected, atol=2e-4 * np.abs(expected).max())
