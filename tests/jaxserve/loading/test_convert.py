"""Hugging Face folders to Orbax folders and back: nothing is lost on the way."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoints import orbax_store
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, HFCheckpoint
from jaxserve.checkpoints.orbax_store import OrbaxCheckpoint, StoredArray
from jaxserve.checkpoints.orbax_writer import Writer
from jaxserve.checkpoints.quantized import dequantized
from jaxserve.convert import main
from jaxserve.generate.__main__ import main as generate
from jaxserve.loading.convert import to_hf, to_orbax
from jaxserve.loading.spec import open_checkpoint
from jaxserve.plan.__main__ import main as plan
from tests.jaxserve.cluster.processes import free_port
from tests.jaxserve.loading.convert_harness import (
    BUNDLED,
    GOLDEN,
    ROOT,
    assert_same,
    changed,
    mesh,
    silent,
)
from tests.jaxserve.loading.loaded import load_params
from tests.slow_cases import slow_but

# fused and separate projections, tied heads, biases, mixtures, latent attention, another's modules,
# rotated pairs beside each other, stacked experts, corrections and norms of other names, states
PLAIN = (
    "llama_tied",
    "phi3_window",
    "qwen2_gqa",
    "gemma3_two_ropes",
    "qwen2_moe_shared_expert",
    "gpt_oss_three_layers",
    "deepseek_v2_lite",
    "deepseek_v3_q_lora",
    "qwen3_embedding",
    "glm4_gqa",
    "granite_moe_biases",
    "ernie4_5_moe_every_second",
    "hunyuan_moe_legacy",
    "qwen3_next",
    "qwen3_5_moe",
    "lfm2_moe",
)
QUANTIZED = ("deepseek_v3_fp8", "gpt_oss_mxfp4", "ministral3_fp8")
QUICK = (
    *("llama_tied", "phi3_window", "qwen2_gqa", "gpt_oss_three_layers", "deepseek_v2_lite"),
    *("glm4_gqa", "hunyuan_moe_legacy", "qwen3_next"),
)


@pytest.mark.parametrize("case", slow_but(PLAIN + QUANTIZED, (*QUICK, "ministral3_fp8")))
def test_one_device_holds_the_same_bits(case: str, converted: Callable[[str], Path]) -> None:
    direct, stored = (
        load_params(open_checkpoint(folder), mesh()) for folder in (GOLDEN / case, converted(case))
    )
    assert_same(stored, direct)


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("phi3_window", (1, 1, 2)),
        ("phi3_window", (1, 1, 4)),  # two kv heads: each is copied
        ("llama_mqa", (2, 1, 4)),  # one
        ("qwen2_gqa", (1, 1, 4)),  # and their biases
        ("glm4_gqa", (1, 1, 4)),
        ("qwen2_moe_shared_expert", (1, 4, 2)),
        pytest.param("deepseek_v2_lite", (1, 4, 2), marks=pytest.mark.slow),
        ("gpt_oss_three_layers", (2, 2, 2)),
        pytest.param("qwen3_5", (1, 1, 4), marks=pytest.mark.slow),
        ("qwen3_next", (1, 4, 2)),
        pytest.param("lfm2", (1, 1, 4), marks=pytest.mark.slow),
    ],
)
def test_eight_devices_hold_the_same_bits(
    case: str, axes: tuple[int, int, int], converted: Callable[[str], Path]
) -> None:
    direct, stored = (
        load_params(open_checkpoint(folder), mesh(*axes))
        for folder in (GOLDEN / case, converted(case))
    )
    assert_same(stored, direct)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_may_be_asked_for(dtype: str, converted: Callable[[str], Path]) -> None:
    folders = (GOLDEN / "llama_tied", converted("llama_tied"))
    direct, stored = (load_params(open_checkpoint(folder), mesh(), dtype) for folder in folders)
    assert_same(stored, direct)


def test_orbax_alone_loads_the_parameters(converted: Callable[[str], Path]) -> None:
    params = load_params(HFCheckpoint.open(GOLDEN / "phi3_window"), mesh())
    found: Any = ocp.load(converted("phi3_window") / "orbax")
    for i, layer in enumerate(params["layers"]):
        assert set(found["layers"][str(i)]) == set(layer)
        for name, value in layer.items():
            np.testing.assert_array_equal(found["layers"][str(i)][name], np.asarray(value))


@pytest.mark.parametrize("case", slow_but(PLAIN, QUICK))
def test_back_are_the_tensors_of_the_source(
    case: str, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    to_hf(converted(case), tmp_path / "back", silent)
    source, back = (
        load_file(folder / "model.safetensors") for folder in (GOLDEN / case, tmp_path / "back")
    )
    ignored = {
        name for name in set(source) - set(back) if name == "lm_head.weight"
    }  # a tied head, stored twice
    assert set(back) == set(source) - ignored
    for name, tensor in back.items():
        assert (tensor.dtype, tensor.shape) == (source[name].dtype, source[name].shape), name
        assert tensor.tobytes() == source[name].tobytes(), name
    for path in GOLDEN.joinpath(case).rglob("*.json"):
        assert (
            tmp_path / "back" / path.relative_to(GOLDEN / case)
        ).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("case", QUANTIZED)
def test_what_was_quantized_comes_back_in_bfloat16(
    case: str, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    to_hf(converted(case), tmp_path / "back", silent)
    back = HFCheckpoint.open(tmp_path / "back")
    assert "quantization_config" not in back.config
    assert {tensor.dtype.name for tensor in back.tensors.values()} <= {"bfloat16", "float32"}
    source = HFCheckpoint.open(GOLDEN / case)
    for name, tensor in dequantized(source.tensors, source.config).items():
        if name in back.tensors:
            whole = tensor[tuple(slice(0, size) for size in tensor.shape)].astype(
                back.tensors[name].dtype
            )
            assert whole.tobytes() == np.ascontiguousarray(back.tensors[name]).tobytes(), name
    assert_same(load_params(back, mesh()), load_params(source, mesh()))


def test_back_in_several_files(converted: Callable[[str], Path], tmp_path: Path) -> None:
    to_hf(converted("phi3_window"), tmp_path / "back", silent, file_bytes=20_000)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert_same(
        load_params(HFCheckpoint.open(tmp_path / "back"), mesh()),
        load_params(HFCheckpoint.open(GOLDEN / "phi3_window"), mesh()),
    )


def test_back_are_the_names_of_the_source(tmp_path: Path) -> None:
    """A checkpoint has its own prefix for layers, and the plain one for its head."""

    def below_a_prefix(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name.replace("model.", "language_model.model."): x for name, x in tensors.items()}

    source = changed(tmp_path, below_a_prefix, case="llama_gqa")
    to_orbax(source, tmp_path / "orbax", silent)
    to_hf(tmp_path / "orbax", tmp_path / "back", silent)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert "lm_head.weight" in back
    assert back.keys() == load_file(source / "model.safetensors").keys()


def test_half_precision_stays_bfloat16(tmp_path: Path) -> None:
    """Half precision is loaded as bfloat16, and written as it was computed with."""
    source = changed(
        tmp_path, lambda tensors: {name: x.astype(np.float16) for name, x in tensors.items()}
    )
    to_orbax(source, tmp_path / "orbax", silent)
    to_hf(tmp_path / "orbax", tmp_path / "back", silent)
    back = HFCheckpoint.open(tmp_path / "back")
    assert {x.dtype.name for x in back.tensors.values()} == {"bfloat16"}
    assert_same(load_params(back, mesh()), load_params(HFCheckpoint.open(source), mesh()))


def test_zeros_of_both_signs(tmp_path: Path) -> None:
    """Chunks of zeros are not stored; chunks of minus zero are."""

    def zeros(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, tensor in tensors.items():
            tensor[...] = -0.0 if "mlp" in name else 0.0
        return tensors

    source = changed(tmp_path, zeros)
    to_orbax(source, tmp_path / "orbax", silent)
    assert_same(
        load_params(open_checkpoint(tmp_path / "orbax"), mesh()),
        load_params(open_checkpoint(source), mesh()),
    )


def test_nan_is_refused(tmp_path: Path) -> None:
    source = changed(
        tmp_path, lambda tensors: {name: x * np.float32("nan") for name, x in tensors.items()}
    )
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        to_orbax(source, tmp_path / "orbax", silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_cannot_be_converted_is_one_line(
    converted: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    orbax = str(converted("llama_tied"))
    for arguments, said in (
        ([orbax, f"{tmp_path}/x"], "is converted already"),
        (["--to", "hf", str(BUNDLED), f"{tmp_path}/x"], "is not a folder of this command"),
        ([str(BUNDLED), str(tmp_path)], "is there already"),
        ([f"{tmp_path}/none", f"{tmp_path}/x"], "there is no such folder"),
        ([str(BUNDLED), f"{tmp_path}/no/x"], "cannot be made"),
        ([str(BUNDLED), f"{BUNDLED}/x"], "whose files are copied"),
    ):
        assert main(arguments) == 2
        err = capfd.readouterr().err
        assert said in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_host_reads_the_chunks_of_its_slices(
    converted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four devices read a quarter of the experts each, and the attention they share whole."""
    hashed = list[str]()
    check = orbax_store.check_hashes

    def watch(folder: Path, files: Any) -> None:
        hashed.extend(files)
        check(folder, files)

    monkeypatch.setattr(orbax_store, "check_hashes", watch)
    checkpoint = OrbaxCheckpoint.open(converted("qwen2_moe_shared_expert"))
    stored = checkpoint.tensors["layers.0.experts.gate_up"]
    assert isinstance(stored, StoredArray)
    hashed.clear()
    quarter = stored.shape[0] // 4
    stored[(slice(quarter, 2 * quarter), *(slice(0, size) for size in stored.shape[1:]))]
    every = [
        file
        for file in checkpoint.folder.glob("orbax/*/layers.0.experts.gate_up/c/**/*")
        if file.is_file()
    ]
    assert len(hashed) * 4 == len(every) > 4
    read = len(hashed)
    stored[(slice(quarter, 2 * quarter), *(slice(0, size) for size in stored.shape[1:]))]
    assert len(hashed) == read, "once"
    for file in every:
        if str(file.relative_to(checkpoint.folder)) not in hashed:
            file.rename(file.with_name("gone"))
    try:
        stored[(slice(quarter, 2 * quarter), *(slice(0, size) for size in stored.shape[1:]))]
    finally:
        for file in every:
            if file.with_name("gone").exists():
                file.with_name("gone").rename(file)


def test_pytrees_under_one_path(tmp_path: Path) -> None:
    """Values and scales of quantized weights are stored under one path."""
    writer = Writer(tmp_path)
    values = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    scales = np.ones((4,), ml_dtypes.bfloat16)
    writer.add(
        ("layers", 0, "o"), "NH", {"values": values.astype(ml_dtypes.int4), "scales": scales}
    )
    writer.add(("layers", 0, "norm"), "D", scales)
    writer.add(("head",), "DV", values)
    writer.finish()
    (tmp_path / "config.json").write_text("{}")
    orbax_store.write_manifest(tmp_path, {})
    tensors = OrbaxCheckpoint.open(tmp_path).tensors
    assert set(tensors) == {"layers.0.o.values", "layers.0.o.scales", "layers.0.norm", "head"}
    np.testing.assert_array_equal(tensors["layers.0.o.values"][1:3, :].astype(np.int8), values[1:3])
    assert tensors["layers.0.o.values"].dtype == ml_dtypes.int4


def test_the_same_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(BUNDLED), str(tmp_path / "orbax")]) == 0
    said = []
    for folder in (BUNDLED, tmp_path / "orbax"):
        flags = (
            "--max-batch 2 --step-tokens 32 --page-size 16 --cache-tokens 512 --temperature "
            "0 --max-tokens 24 --json"
        )
        cache = ["--compilation-cache", jax.config.jax_compilation_cache_dir]
        assert (
            generate(
                ["--model", str(folder), "--prompt", "Once upon a time", *flags.split(), *cache]
            )
            == 0
        )
        said.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert said[0] == said[1] and len(said[0]) == 24


def test_the_planner_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_orbax(BUNDLED, tmp_path / "orbax", silent)
    reports = []
    for folder in (BUNDLED, tmp_path / "orbax"):
        assert (
            plan(["--model", str(folder), "--topology", "v5e:1x1", "--no-compile", "--json"]) == 0
        )
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] | {"model": ""} == reports[1] | {"model": ""}


HOST = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from pathlib import Path
from jaxserve.checkpoints import orbax_store
from tests.jaxserve.loading.loaded import load_params
from jaxserve.loading.spec import open_checkpoint
from jaxserve.sharding.mesh import MeshSpec
check, read = orbax_store.check_hashes, []
checkpoint = open_checkpoint(Path(sys.argv[3]))
orbax_store.check_hashes = lambda folder, files: (read.extend(files), check(folder, files))
params = load_params(checkpoint, MeshSpec(expert=4).build(jax.devices()))
shards = params["layers"][0]["experts"]["gate_up"].addressable_shards
told = [read, [[shard.index[0].indices(8)[:2], shard.data.tolist()] for shard in shards]]
Path(sys.argv[4]).write_text(json.dumps(told))
"""


@pytest.mark.system
def test_two_hosts_read_their_own_experts(converted: Callable[[str], Path], tmp_path: Path) -> None:
    """Two processes with two devices each read disjoint files of eight experts.

    Every file of an expert is read by one of them.
    """
    folder = converted("qwen2_moe_shared_expert")
    address = f"127.0.0.1:{free_port()}"
    said = [tmp_path / "0", tmp_path / "1"]
    start = [sys.executable, "-c", HOST, address]
    hosts = [
        subprocess.Popen([*start, path.name, str(folder), str(path)], cwd=ROOT) for path in said
    ]
    try:
        assert [host.wait(240) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    told = [json.loads(path.read_text()) for path in said]
    one, two = ({file for file in read if "experts" in file} for read, _ in told)
    every = {
        str(file.relative_to(folder))
        for file in folder.glob("orbax/*/*.experts.*/c/**/*")
        if file.is_file()
    }
    assert one and two and not one & two and one | two == every
    whole = load_params(HFCheckpoint.open(GOLDEN / "qwen2_moe_shared_expert"), mesh())["layers"][0][
        "experts"
    ]
    found = [shard for _, shards in told for shard in shards]
    assert len(found) == 4
    for (begin, end), values in found:
        np.testing.assert_array_equal(
            np.asarray(whole["gate_up"])[begin:end], np.asarray(values, np.float32)
        )
