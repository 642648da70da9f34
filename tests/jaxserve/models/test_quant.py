"""Quantized weights, compared with a checkpoint whose tensors NumPy rounds row by row."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.errors import ModelError
from jaxserve.loading.spec import read_spec
from jaxserve.models import quantize
from jaxserve.models.decoder import param_specs
from jaxserve.models.layers import einsum
from jaxserve.models.quant import SCHEMES, Quantized, contracted, is_quantized
from jaxserve.models.quantize import grouped
from jaxserve.plan.model_config import read_config
from jaxserve.sharding.errors import ShardingError
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import is_param_spec, stored_bytes
from tests.jaxserve.loading.loaded import load_params
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh
from tests.slow_cases import slow_but

GOLDEN = Path(__file__).parents[2] / "golden"
MORE_DENSE = (
    *("llama_gqa", "llama_tied", "qwen3_attention_bias", "llama_mlp_bias", "phi3_window"),
    *("glm4_gqa", "granite_biases", "hunyuan_legacy", "smollm3_windows", "olmo3_legacy"),
    *("ernie4_5_biases", "exaone4_legacy", "seed_oss_all_biases", "qwen2_5_vl", "qwen3_5", "lfm2"),
)
LARGEST = {"int8": 127, "fp8": 448, "int4": 7}
NUMBERS = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn, "int4": ml_dtypes.int4}
STEPS = {
    "int8": 127,
    "fp8": 14,
    "int4": 7,
}  # that the largest number is long; of fp8 the longest: 448 = 14 * 32
MESHES = ((1, 1, 2), (1, 1, 4), (2, 1, 2))
BOUND = 1e-4
WEIGHTS_ALONE = [name for name, scheme in SCHEMES.items() if not scheme.activations]


@pytest.fixture(scope="session")
def divisible_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a head, whose sums on four devices are multiples of 128 numbers."""
    folder = tmp_path_factory.mktemp("divisible")
    config = json.loads((GOLDEN / "llama_gqa" / "config.json").read_text())
    config |= {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    config |= {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(3)
    shapes = {"model.embed_tokens": (64, 128), "lm_head": (64, 128), "model.norm": (128,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.{name}_proj": (rows, 128)
            for name, rows in (("q", 512), ("k", 256), ("v", 256))
        }
        shapes |= {f"{at}self_attn.o_proj": (128, 512), f"{at}mlp.down_proj": (128, 512)}
        shapes |= {f"{at}mlp.{name}_proj": (512, 128) for name in ("gate", "up")}
        shapes |= {f"{at}{name}_layernorm": (128,) for name in ("input", "post_attention")}
    tensors = {
        f"{name}.weight": draw.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def rounded_rows(tensor: np.ndarray, weights: str) -> np.ndarray:
    """Return the numbers that quantized rows stand for."""
    scheme, _, group = weights.removeprefix("w8a8-").partition("-g")
    groups = tensor.reshape(len(tensor), -1, int(group or tensor.shape[1]))
    scales = np.abs(groups).max(-1, keepdims=True) / np.float32(LARGEST[scheme])
    numbers = groups / scales if scheme == "fp8" else np.round(groups / scales)
    return (numbers.astype(NUMBERS[scheme]).astype(np.float32) * scales).reshape(tensor.shape)


def rounded_checkpoint(folder: Path, weights: str, target: Path) -> Path:
    """Write a checkpoint with every projection rounded, and the head if it is asked for."""
    scheme, _, head = weights.partition("+")
    states = ("in_proj_qkv.weight", "in_proj_z.weight")
    suffixes = ("_proj.weight", *states, *(["lm_head.weight"] if head else []))
    tensors = load_file(folder / "model.safetensors")
    rounded = {
        n: rounded_rows(t, scheme) if n.endswith(suffixes) else t for n, t in tensors.items()
    }
    shutil.copy(folder / "config.json", target)
    save_file(rounded, target / "model.safetensors")
    return target


def load(folder: Path, weights: str = "auto", mesh: Mesh | None = None) -> dict:
    return load_params(
        HFCheckpoint.open(folder), mesh or one_device_mesh(), "float32", weights=weights
    )


def dequantized_weight(name: str, weight: Quantized, axes: str) -> np.ndarray:
    at = contracted(name, axes)
    scales = np.asarray(weight.scales)
    numbers = grouped(np.asarray(weight.values).astype(np.float32), at, scales.shape[at.start])
    return (numbers * np.expand_dims(scales, at.start + 1)).reshape(weight.values.shape)


def named_parameters(
    params: dict, folder: Path
) -> Iterator[tuple[str, jax.Array | Quantized, str]]:
    """Yield the name, the parameter and the axes of each parameter."""
    spec = read_spec(HFCheckpoint.open(folder).config)[1]
    specs = jax.tree.leaves(param_specs(spec, jnp.dtype(jnp.float32)), is_leaf=is_param_spec)
    found, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    for (path, leaf), declared in zip(found, specs, strict=True):
        yield path[-1].key, leaf, declared.axes


@pytest.mark.parametrize("weights", [*SCHEMES, "int8+head", "int4-g64+head"])
def test_numbers_times_scales_are_the_rounded_checkpoint(
    weights: str, divisible_checkpoint: Path, tmp_path: Path
) -> None:
    """Weights are equal bit for bit in any memory order, within half a step of the source."""
    expected = load(rounded_checkpoint(divisible_checkpoint, weights, tmp_path))
    plain = load(divisible_checkpoint)
    quantized = load(divisible_checkpoint, weights)
    whole = (
        named_parameters(expected, divisible_checkpoint),
        named_parameters(plain, divisible_checkpoint),
    )
    kinds = set[str]()
    for (name, weight, axes), (_, rounded, _), (_, exact, _) in zip(
        named_parameters(quantized, divisible_checkpoint), *whole, strict=True
    ):
        if not isinstance(weight, Quantized):
            np.testing.assert_array_equal(weight, exact)
            continue
        kinds.add(name)
        found = dequantized_weight(name, weight, axes)
        exact = np.asarray(exact)
        np.testing.assert_array_equal(found, rounded)
        step = np.abs(exact).max() / STEPS[weights.removeprefix("w8a8-")[:4].removesuffix("+")]
        assert 0 < np.abs(found - exact).max() <= step / 2 * 1.0001
    assert kinds == {"qkv", "o", "gate_up", "down"} | (
        {"head"} if weights.endswith("+head") else set()
    )


@pytest.mark.parametrize("weights", slow_but(WEIGHTS_ALONE, ("fp8", "int4-g128")))
def test_logits_of_a_quantized_model(
    weights: str, divisible_checkpoint: Path, tmp_path: Path
) -> None:
    check_logits(divisible_checkpoint, weights, MeshSpec(tensor=4).build(jax.devices()), tmp_path)


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("olmo2_gqa", "int8"),
        ("phi3_window", "int4"),
        pytest.param("gemma2_caps", "int8", marks=pytest.mark.slow),
        pytest.param("llama_tied", "fp8", marks=pytest.mark.slow),
        *(pytest.param(case, "int8", marks=pytest.mark.slow) for case in MORE_DENSE),
    ],
)
def test_logits_of_every_dense_family(case: str, weights: str, tmp_path: Path) -> None:
    """The cases have tied embeddings, biases, and tensors that are fused in the checkpoint."""
    check_logits(GOLDEN / case, weights, MeshSpec(tensor=2).build(jax.devices()), tmp_path)


def test_kv_heads_that_several_devices_hold(tmp_path: Path) -> None:
    check_logits(GOLDEN / "llama_mqa", "int8", MeshSpec(tensor=4).build(jax.devices()), tmp_path)


def check_logits(folder: Path, weights: str, mesh: Mesh, target: Path) -> None:
    prompts = np.random.default_rng(0).integers(0, 64, (2, 12))
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


@pytest.mark.parametrize("weights", WEIGHTS_ALONE)
@pytest.mark.parametrize(
    ("name", "axes", "subscripts", "shape"),
    [("qkv", "DKQH", "TD,DKQH->TKQH", (128, 2, 4, 16)), ("down", "FD", "TF,FD->TD", (256, 48))],
)
@pytest.mark.parametrize(
    ("dtype", "rows"), [("float32", 5), ("float32", 65), ("bfloat16", 5), ("bfloat16", 65)]
)
def test_products(
    weights: str,
    name: str,
    axes: str,
    subscripts: str,
    shape: tuple[int, ...],
    dtype: str,
    rows: int,
) -> None:
    """Products are those of float64 with the weight's numbers.

    In bfloat16, groups of many rows are rounded.
    """
    scheme = SCHEMES[weights]
    draw = np.random.default_rng(5)
    at = contracted(name, axes)
    weight = draw.normal(0, 0.1, shape).astype(np.float32)
    scales = quantize.find_scales(
        weight, at, shape[0] // (scheme.group or shape[0]), scheme.largest
    )
    held = Quantized(
        jnp.asarray(quantize.round_to(scheme.dtype, weight, at, scales)),
        jnp.asarray(scales),
        scheme,
    )
    x = jnp.asarray(draw.normal(0, 1, (rows, shape[0])), dtype)
    exact = np.einsum(
        subscripts,
        np.asarray(x, np.float64),
        dequantized_weight(name, held, axes).astype(np.float64),
    )
    rounded = scheme.group and 2 * rows > scheme.group and dtype == "bfloat16"
    found = jax.jit(einsum, static_argnums=0)(subscripts, x, held)
    np.testing.assert_allclose(found, exact, atol=0.03 if rounded else 3e-5)


@pytest.mark.parametrize("axes", slow_but(MESHES, MESHES[2:]))
@pytest.mark.parametrize("weights", slow_but(list(SCHEMES), ("fp8", "int4-g32", "w8a8-int8")))
def test_shards_hold_what_one_device_holds(
    weights: str,
    axes: tuple[int, int, int],
    divisible_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards are equal bit for bit, in however many parts each was read."""
    one = load(divisible_checkpoint, weights)
    monkeypatch.setattr(quantize, "MAX_NUMBERS", 1000)
    mesh = MeshSpec(*axes).build(jax.devices())
    spread = load(divisible_checkpoint, weights, mesh)
    assert spread["layers"][0]["down"].values.sharding.shard_shape((512, 128)) == (
        512 // axes[2],
        128,
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(spread), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(
            np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
        )


def test_channels_of_zeros_stay_zeros(divisible_checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(divisible_checkpoint / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(divisible_checkpoint / "config.json", tmp_path)
    down = load(tmp_path, "int8")["layers"][0]["down"]
    assert not np.asarray(down.values)[:, 3].any() and np.asarray(down.scales)[0, 3] == 1


@pytest.mark.parametrize(
    ("weights", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4), ("int4-g32", 5)]
)
def test_bytes(weights: str, bits: int) -> None:
    """Two int4 take a byte; a float32 scale for 32 of them takes a bit for each."""
    specs = param_specs(
        read_spec(read_config("llama3.1-8b")[1])[1], jnp.dtype(jnp.bfloat16), SCHEMES[weights]
    )
    down = specs["layers"][0]["down"]
    assert abs(down.values.nbytes + down.scales.nbytes - 14336 * 4096 * bits // 8) <= 4096 * 4
    array = jax.device_put(np.zeros((64, 63), SCHEMES[weights].dtype))
    assert (
        array.on_device_size_in_bytes()
        == stored_bytes(array.shape, array.dtype)
        == 64 * 63 // (8 // (bits & 12))
    )


@pytest.mark.parametrize(
    ("case", "weights", "problem"),
    [
        (
            "mixtral_gqa",
            "int4-g32",
            "down sums 12 numbers, no multiple of 32 .choose one without groups",
        ),
        (
            "gpt_oss_mxfp4",
            "int4-g128",
            "sums 64 numbers, no multiple of 128 .groups of 32 or 64 do",
        ),
        (
            "mixtral_gqa",
            "w8a8-int8",
            "--weights is w8a8-int8; it is not built in for mixtures of experts .choose int8",
        ),
        ("llama_tied", "int8+head", "no head beside its embedding"),
        (
            "llama_gqa",
            "int4-g32",
            "down sums 24 numbers, no multiple of 32 .choose one without groups",
        ),
        (
            "llama_gqa",
            "int3",
            "--weights is int3; choose auto, int8, fp8, int4, int4-g32, int4-g64, int4-g128",
        ),
        ("llama_gqa", "int8 ", "--weights is .int8 .; choose"),
    ],
)
def test_what_cannot_be_quantized(case: str, weights: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        load(GOLDEN / case, weights)


def test_groups_that_shards_would_cut(divisible_checkpoint: Path) -> None:
    spec = read_spec(HFCheckpoint.open(divisible_checkpoint).config)[1]
    down = param_specs(spec, jnp.dtype(jnp.float32), SCHEMES["int4-g128"])["layers"][0]["down"]
    with pytest.raises(
        ShardingError,
        match=r"axis F .mlp. of size 4 does not divide by mesh axis 'tensor' of size 8",
    ):
        down.scales.sharding(MeshSpec(tensor=8).build(jax.devices()))
