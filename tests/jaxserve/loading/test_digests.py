"""Digests of weights: equal on every mesh, and different wherever one number is."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.loading import parameters
from jaxserve.loading.digests import ParameterDigests, WeightDigests, factor_of
from jaxserve.loading.spec import open_checkpoint
from jaxserve.models.families.weight_table import Tensor
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.errors import ShardingError
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.loading.convert_harness import GOLDEN
from tests.jaxserve.loading.loaded import load_params
from tests.slow_cases import slow_but

# Fused and plain, tied, biases, kv heads that are copied, latent attention, experts in tensors of
# their own and together, numbers that are dequantized, rotated pairs beside each other.
KINDS = (
    "llama_gqa",
    "llama_tied",
    "qwen2_gqa",
    "phi3_mha_tied",
    "olmo2_gqa",
    "qwen3_moe_gqa",
    "qwen2_moe_shared_expert",
    "deepseek_v3_q_lora",
    "deepseek_v3_fp8",
    "gpt_oss_three_layers",
    "gpt_oss_mxfp4",
    "glm4_gqa",
    "qwen3_5",
    "lfm2",
)
FORMS = [(case, weights) for case in KINDS for weights in ("auto", "int8", "int4")]
QUICK = (
    *(
        ("llama_gqa", "auto"),
        ("llama_tied", "int8"),
        ("qwen2_gqa", "int4"),
        ("phi3_mha_tied", "int8"),
    ),
    *(("qwen2_moe_shared_expert", "auto"), ("qwen3_moe_gqa", "int4"), ("glm4_gqa", "int8")),
    *(("deepseek_v3_q_lora", "auto"), ("deepseek_v3_fp8", "int8"), ("gpt_oss_mxfp4", "int4")),
    *(("qwen3_5", "auto"), ("lfm2", "int4")),
)
QUICK_FOLDERS = (
    "llama_tied",
    "phi3_mha_tied",
    "qwen2_moe_shared_expert",
    "deepseek_v3_fp8",
    "lfm2",
)
MESHES = (MeshSpec(), MeshSpec(tensor=2), MeshSpec(tensor=4), MeshSpec(expert=2, tensor=2))


def digests_of(folder: Path, spread: MeshSpec = MESHES[0], weights: str = "auto") -> WeightDigests:
    digests = WeightDigests()
    mesh = spread.build(jax.devices())
    load_params(open_checkpoint(folder), mesh, weights=weights, digests=digests)
    return digests


@pytest.mark.parametrize("form", slow_but(FORMS, QUICK))
def test_every_mesh_says_the_same(form: tuple[str, str]) -> None:
    """Meshes divide heads, experts and their copies differently."""
    case, weights = form
    one = digests_of(GOLDEN / case, weights=weights)
    compared = 0
    for spread in MESHES[1:]:
        try:
            other = digests_of(GOLDEN / case, spread, weights)
        except ShardingError:
            continue
        assert one.first_difference(other.text()) is None
        compared += 1
    assert compared


@pytest.mark.parametrize("case", slow_but(KINDS, QUICK_FOLDERS))
def test_a_converted_folder_says_the_same(case: str, converted: Callable[[str], Path]) -> None:
    source = digests_of(GOLDEN / case)
    assert source.first_difference(digests_of(converted(case), MESHES[1]).text()) is None


@pytest.mark.parametrize("case", sorted({*KINDS} - {"deepseek_v3_fp8"}))  # NumPy has no fp8
def test_one_number_changes_the_digest_of_every_tensor(case: str, tmp_path: Path) -> None:
    folder = tmp_path / case
    shutil.copytree(GOLDEN / case, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: _altered(t) for name, t in tensors.items()}, folder / "model.safetensors")
    before = digests_of(GOLDEN / case)._sums[0]
    after = digests_of(folder)._sums[0]
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] == after[name]] == []


def test_the_altered_tensor_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "altered"
    shutil.copytree(GOLDEN / "llama_gqa", folder)
    tensors = load_file(folder / "model.safetensors")
    before = digests_of(GOLDEN / "llama_gqa")
    for name, tensor in tensors.items():
        save_file({**tensors, name: _altered(tensor)}, folder / "model.safetensors")
        assert before.first_difference(digests_of(folder).text()) == name


def _altered(tensor: np.ndarray) -> np.ndarray:
    """Change one number of a tensor."""
    altered = tensor.copy()
    random = np.random.default_rng(0)
    at = tuple(random.integers(0, size) for size in tensor.shape)
    altered[at] = _another(altered[at])
    return altered


def _another(number: np.generic) -> np.generic:
    """Return a number that is far from this one, so that no rounding brings it back."""
    if number.dtype == np.uint8:  # two numbers of MXFP4, or their scale
        return np.uint8(number ^ 0x11)
    other = np.float32(number) * 2 + 1
    return other.astype(number.dtype)


def test_a_digest_is_the_sum_of_bits_times_factors() -> None:
    """Python's integers, number by number, give the digests of a vector and of kv heads."""
    folder = GOLDEN / "llama_gqa"
    tensors = load_file(folder / "model.safetensors")
    norm = tensors["model.norm.weight"]
    keys = tensors["model.layers.0.self_attn.k_proj.weight"].reshape(2, -1, len(norm))
    width = keys.shape[1]
    digests = digests_of(folder, MeshSpec(tensor=4))._sums[0]
    along = [int(factor_of("D", i)) for i in range(len(norm))]
    of_norm = sum(int(bits) * along[i] for i, bits in enumerate(norm.view(np.uint32)))
    assert digests["model.norm.weight"] == of_norm * factor_of("norm 0 values", 0) % 2**64
    of_keys = 0
    for head, h, i in np.ndindex(2, width, len(norm)):
        place = factor_of("K", head) * factor_of("H", h) * along[i] * factor_of("Q ", 0)
        of_keys += int(keys.view(np.uint32)[head, h, i]) * place
    wanted = of_keys * factor_of("k 0 values", 0) % 2**64
    assert digests["model.layers.0.self_attn.k_proj.weight"] == wanted


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, np.int8]
)
def test_shards_add_up_and_every_bit_counts(dtype: type) -> None:
    random = np.random.default_rng(1)
    numbers = random.integers(-8, 8, (4, 6)).astype(dtype)
    rows = [Tensor("it", ("o",), "NH")]
    spec = _spec()

    def text(array: np.ndarray, *cuts: int) -> str:
        digests = WeightDigests()
        parameter = ParameterDigests(digests, rows, spec)
        edges = [0, *cuts, len(array)]
        for begin, end in itertools.pairwise(edges):
            asked = (range(begin, end), range(6))
            parameter.add("NH", asked, array[begin:end], {0}, "values")
        return digests.text()

    assert text(numbers) == text(numbers, 1) == text(numbers, 1, 3)
    seen = {text(numbers)}
    for at in np.ndindex(numbers.shape):
        altered = numbers.copy()
        altered[at] = 7 - np.float32(altered[at])
        seen.add(text(altered))
    seen.add(text(numbers[::-1]))
    seen.add(text(numbers[:, ::-1]))
    assert len(seen) == numbers.size + 3


def _spec() -> ModelSpec:
    return ModelSpec("x", 8, 6, 1, 4, 4, 6, 8, 1e-5, 16)


def test_hosts_have_the_digests_of_their_parts() -> None:
    rows = [Tensor("it", ("o",), "NH")]
    digests = WeightDigests()
    parameter = ParameterDigests(digests, rows, _spec())
    for host in range(2):
        asked = (range(host * 2, host * 2 + 2), range(6))
        parameter.add("NH", asked, np.full((2, 6), 1.5, np.float32), {host}, "values")
    assert digests.text(0) != digests.text(1)
    assert digests.first_difference(digests.text(1), 1) is None
    assert digests.first_difference(digests.text(1), 0) == "it"


@pytest.mark.parametrize("on_a_host", [1, 2])
@pytest.mark.parametrize(
    "case", ["llama_mqa", "llama_gqa", "olmo2_gqa", "qwen3_moe_gqa", "glm4_gqa", "qwen3_5"]
)
def test_every_host_has_a_digest_of_all_that_it_holds(
    case: str, on_a_host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that hold later copies of kv heads only are no exception."""
    add = ParameterDigests.add
    spread = MeshSpec(tensor=4)
    devices = list(spread.build(jax.devices()).devices.flat)

    def by_place(
        self: ParameterDigests, axes: str, asked: Any, shard: Any, hosts: Any, kind: str
    ) -> None:
        found = {place // on_a_host for place in range(len(devices)) if holds(axes, asked, place)}
        add(self, axes, asked, shard, found, kind)

    def holds(axes: str, asked: Any, place: int) -> bool:
        return place in places[axes, asked]

    places: dict[Any, set[int]] = {}
    sharded = parameters._sharded

    def noted(param: Any, mesh: Any, *rest: Any) -> Any:
        for device, index in param.sharding(mesh).devices_indices_map(param.shape).items():
            asked = tuple(range(n)[i] for n, i in zip(param.shape, index or (), strict=True))
            places.setdefault((param.axes, asked), set()).add(devices.index(device))
        return sharded(param, mesh, *rest)

    monkeypatch.setattr(ParameterDigests, "add", by_place)
    monkeypatch.setattr(parameters, "_sharded", noted)
    folder = tmp_path / case
    shutil.copytree(GOLDEN / case, folder)
    before = digests_of(folder, spread)._sums
    tensors = load_file(folder / "model.safetensors")
    twice = {name: tensor * 2 + 1 for name, tensor in tensors.items()}
    save_file(
        {name: t.astype(tensors[name].dtype) for name, t in twice.items()},
        folder / "model.safetensors",
    )
    after = digests_of(folder, spread)._sums
    assert before.keys() == after.keys() == set(range(4 // on_a_host))
    same = {
        name for host in before for name in before[host] if before[host][name] == after[host][name]
    }
    assert same == set()
