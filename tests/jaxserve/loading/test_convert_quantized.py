"""Folders with quantized weights: they hold what quantizing on load gives, and are not rounded."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.int4_packing import paired, unpaired
from jaxserve.checkpoints.orbax_store import MANIFEST, OrbaxCheckpoint, write_manifest
from jaxserve.checkpoints.orbax_writer import Writer
from jaxserve.cluster.compatibility import difference, facts_of_engine, facts_of_model
from jaxserve.config import EngineOptions
from jaxserve.convert import main
from jaxserve.errors import ModelError
from jaxserve.generate.__main__ import main as generate
from jaxserve.llm import LLM
from jaxserve.loading import parameters
from jaxserve.loading.convert import to_orbax
from jaxserve.loading.folder import load, open_model
from jaxserve.loading.spec import open_checkpoint, read_spec
from jaxserve.models.quant import SCHEMES, parse_scheme
from jaxserve.plan.__main__ import main as plan
from jaxserve.server.cards import model_card
from tests.jaxserve.loading.convert_harness import (
    BUNDLED,
    GOLDEN,
    SMALL_CHUNKS,
    assert_same,
    flip,
    mesh,
    silent,
)
from tests.jaxserve.loading.loaded import load_params

MESHES = ((1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 4))
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
WIDE |= {"head_dim": 64, "vocab_size": 64}


def random_llama(folder: Path, **changes: int) -> Path:
    """Write a random Llama with two kv heads, whose sums on four devices are multiples of 128."""
    config = json.loads((GOLDEN / "llama_gqa" / "config.json").read_text()) | WIDE | changes
    family, spec = read_spec(config)
    draw = np.random.default_rng(3)
    shapes = {row.name: row.shape(row.sizes(spec)) for row in family.tensors(spec)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("random") / "wide")


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """Return a function from a source and a scheme to its Orbax folder, which is made once."""
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def of(source: Path, weights: str) -> Path:
        target = folder / f"{source.name}-{weights}"
        to_orbax(source, target, silent, SMALL_CHUNKS * 64, weights)
        return target

    return of


@pytest.fixture
def never_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("rounds what is stored")

    monkeypatch.setattr(parameters, "ShardQuantizer", refuse)


@pytest.mark.parametrize(
    ("weights", "axes"),
    [
        pytest.param(
            weights, axes, marks=[] if number % len(MESHES) == place else [pytest.mark.slow]
        )
        for number, weights in enumerate((*SCHEMES, "int8+head", "int4-g128+head"))
        for place, axes in enumerate(MESHES)
    ],
)
def test_what_is_stored_is_what_would_be_loaded(
    weights: str,
    axes: tuple[int, int, int],
    wide: Path,
    converted: Callable[[Path, str], Path],
    request: pytest.FixtureRequest,
) -> None:
    direct = load_params(open_checkpoint(wide), mesh(*axes), weights=weights)
    folder = converted(wide, weights)
    request.getfixturevalue("never_rounds")
    assert_same(load_params(open_checkpoint(folder), mesh(*axes)), direct)


@pytest.mark.parametrize(
    ("case", "weights", "axes"),
    [
        pytest.param("llama_mqa", "int8", (1, 1, 4), marks=pytest.mark.slow),
        ("llama_mqa", "int4", (2, 1, 4)),
        ("qwen2_gqa", "fp8", (1, 1, 4)),  # biases
        (
            "phi3_window",
            "int4",
            (1, 1, 2),
        ),  # fused in the source, two of a head's 8 numbers to a byte
        pytest.param("gemma2_caps", "int8", (1, 1, 2), marks=pytest.mark.slow),
        pytest.param("olmo2_gqa", "int8", (1, 1, 4), marks=pytest.mark.slow),
        pytest.param("glm4_gqa", "int4", (1, 1, 4), marks=pytest.mark.slow),
        pytest.param("granite_moe_biases", "int8", (1, 4, 2), marks=pytest.mark.slow),
        pytest.param("ministral3_fp8", "int8", (1, 1, 2), marks=pytest.mark.slow),
        pytest.param("llama_tied", "int4", (1, 1, 1), marks=pytest.mark.slow),
        ("quantized/awq", "int8", (1, 1, 4)),  # dequantized, then quantized
        pytest.param("quantized/gptq_4bit", "int4-g32", (1, 1, 1), marks=pytest.mark.slow),
        ("quantized/compressed_w4a16_asymmetric", "int4", (1, 1, 2)),
        pytest.param("quantized/compressed_fp8_block", "fp8", (1, 1, 1), marks=pytest.mark.slow),
        ("mixtral_gqa", "int8", (1, 4, 2)),  # experts with tensors of their own
        pytest.param("deepseek_v3_fp8", "int4", (1, 4, 2), marks=pytest.mark.slow),
        ("gpt_oss_mxfp4", "int4-g32", (1, 4, 2)),
        pytest.param("qwen3_5", "int8", (1, 1, 4), marks=pytest.mark.slow),
        pytest.param("qwen3_next", "int4", (1, 4, 2), marks=pytest.mark.slow),
        ("lfm2_moe", "int8", (1, 2, 2)),
    ],
)
def test_every_kind_of_source(
    case: str, weights: str, axes: tuple[int, int, int], converted: Callable[[Path, str], Path]
) -> None:
    direct = load_params(open_checkpoint(GOLDEN / case), mesh(*axes), weights=weights)
    assert_same(
        load_params(open_checkpoint(converted(GOLDEN / case, weights)), mesh(*axes)), direct
    )


def test_a_converted_folder_in_full_precision_is_a_source(
    wide: Path, converted: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    to_orbax(wide, tmp_path / "plain", silent)
    to_orbax(tmp_path / "plain", tmp_path / "int4", silent, weights="int4")
    again = load_params(open_checkpoint(tmp_path / "int4"), mesh())
    assert_same(again, load_params(open_checkpoint(converted(wide, "int4")), mesh()))
    manifests = (
        json.loads((folder / MANIFEST).read_text())
        for folder in (tmp_path / "int4", tmp_path / "plain")
    )
    one, other = manifests
    assert one["source"] == other["source"] and (one["weights"], other["weights"]) == (
        "int4",
        "auto",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_is_of_what_is_not_quantized(
    dtype: str, wide: Path, converted: Callable[[Path, str], Path]
) -> None:
    direct = load_params(open_checkpoint(wide), mesh(), dtype, weights="int8")
    found = load_params(open_checkpoint(converted(wide, "int8")), mesh(), dtype)
    assert found["embed"].dtype == dtype
    assert_same(found, direct)


# ---- int4 in half a byte


def test_pairs() -> None:
    numbers = np.random.default_rng(0).integers(-8, 8, (3, 5, 14), np.int8).astype(ml_dtypes.int4)
    pairs = paired(numbers)
    assert pairs.dtype == np.uint8 and pairs.shape == (3, 5, 7)
    assert unpaired(pairs).dtype == ml_dtypes.int4
    np.testing.assert_array_equal(unpaired(pairs).astype(np.int8), numbers.astype(np.int8))
    one = ml_dtypes.int4(-3)
    two = ml_dtypes.int4(5)
    assert paired(np.array([one, two])).tolist() == [0x5D], "the first in the low half"


@pytest.mark.parametrize("width", [30, 31])
def test_any_slice_of_int4(width: int, tmp_path: Path) -> None:
    """Slices of chunks of four rows begin and end at even and odd numbers."""
    numbers = np.random.default_rng(1).integers(-7, 8, (16, width), np.int8)
    writer = Writer(tmp_path, chunk_bytes=64)
    writer.add(("head",), "DV", {"values": numbers.astype(ml_dtypes.int4)})
    writer.finish()
    (tmp_path / "config.json").write_text("{}")
    write_manifest(tmp_path, {}, "int4+head")
    stored = OrbaxCheckpoint.open(tmp_path).tensors["head.values"]
    assert stored.shape == (16, width) and stored.dtype == ml_dtypes.int4
    for start in range(0, width, 3):
        for stop in range(start, width + 1, 4):
            found = stored[slice(3, 9), slice(start, stop)]
            np.testing.assert_array_equal(found.astype(np.int8), numbers[3:9, start:stop])
    np.testing.assert_array_equal(stored[:, :].astype(np.int8), numbers)


def test_int4_takes_half_a_byte(wide: Path, converted: Callable[[Path, str], Path]) -> None:
    for weights, bits in (("int8", 8), ("fp8", 8), ("int4", 4), ("int4-g32", 4)):
        folder = converted(wide, weights)
        chunks = folder.glob("orbax/*/layers.*.values/c/**/*")
        numbers = 2 * 128 * (12 * 64 + 8 * 64 + 3 * 512)
        found = sum(path.stat().st_size for path in chunks if path.is_file())
        assert numbers * bits / 8 <= found < numbers * bits / 8 * 1.002, (
            "but for an index of 20 bytes to a chunk"
        )


def test_an_odd_vocabulary(tmp_path: Path) -> None:
    source = random_llama(tmp_path / "odd", vocab_size=65)
    to_orbax(source, tmp_path / "orbax", silent, weights="int4+head")
    direct = load_params(open_checkpoint(source), mesh(), weights="int4+head")
    assert_same(load_params(open_checkpoint(tmp_path / "orbax"), mesh()), direct)


# ---- which form


def test_the_stored_form_may_be_named_and_no_other(
    wide: Path, converted: Callable[[Path, str], Path]
) -> None:
    folder = converted(wide, "int4-g32")
    checkpoint = open_checkpoint(folder)
    assert_same(
        load_params(checkpoint, mesh(), weights="int4-g32"), load_params(checkpoint, mesh())
    )
    for asked in ("int8", "int4", "int4-g32+head"):
        with pytest.raises(ModelError) as error:
            load_params(checkpoint, mesh(), weights=asked)
        assert str(error.value).startswith(f"--weights is {asked}; {folder} has int4-g32 weights")
        assert "\n" not in str(error.value)


def test_the_same_words_and_the_same_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights quantized on disk and on load give the same tokens and facts everywhere."""
    assert main([str(BUNDLED), str(tmp_path / "int8"), "--weights", "int8"]) == 0
    flags = (
        "--max-batch 2 --step-tokens 32 --page-size 16 --cache-tokens 512 --temperature 0 "
        "--max-tokens 24 --json"
    )
    cached = ["--compilation-cache", jax.config.jax_compilation_cache_dir]
    said = []
    for folder, given in ((BUNDLED, ["--weights", "int8"]), (tmp_path / "int8", [])):
        assert (
            generate(
                [
                    "--model",
                    str(folder),
                    "--prompt",
                    "Once upon a time",
                    *flags.split(),
                    *given,
                    *cached,
                ]
            )
            == 0
        )
        said.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert said[0] == said[1] and len(said[0]) == 24
    assert (
        generate(["--model", str(tmp_path / "int8"), "--prompt", "x", "--weights", "int4", *cached])
        == 2
    )
    assert "has int8 weights" in capsys.readouterr().err
    plain, named, stored = (
        load(open_model(folder), mesh(), weights=weights)
        for folder, weights in (
            (BUNDLED, "auto"),
            (tmp_path / "int8", "int8"),
            (tmp_path / "int8", "auto"),
        )
    )
    assert named.fingerprint == stored.fingerprint != plain.fingerprint
    assert (plain.weights, stored.weights) == ("auto", "int8")


def test_hosts_must_agree_on_the_form_that_they_found(tmp_path: Path) -> None:
    to_orbax(BUNDLED, tmp_path / "int8", silent, weights="int8")
    facts = []
    for folder in (BUNDLED, tmp_path / "int8"):
        options = EngineOptions(
            max_batch=2, step_tokens=32, page_size=16, cache_tokens=512, max_context=128
        )
        with LLM(folder, options=options) as llm:
            model = llm.model
            config = llm.runner.config
            of_model = facts_of_model(model.spec, model.dtype, model.weights)
            facts.append(facts_of_engine(of_model, config))
            card = model_card(llm, "it")
    assert difference(*facts) == "the form of its weights: int8 there, auto here"
    assert card.weights == "int8" and card.sizes["mlp"]["int8"] > 0


@pytest.mark.parametrize("weights", ["int8", "int4-g32"])
def test_the_planner_counts_what_is_stored(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_orbax(BUNDLED, tmp_path / "orbax", silent, weights=weights)
    flags = ("--topology", "v5e:1x1", "--no-compile", "--json")
    reports = []
    for folder, asked in (
        (BUNDLED, weights),
        (tmp_path / "orbax", "auto"),
        (tmp_path / "orbax", weights),
    ):
        assert plan(["--model", str(folder), "--weights", asked, *flags]) == 0
        reports.append(json.loads(capsys.readouterr().out) | {"model": ""})
    assert reports[0] == reports[1] == reports[2] and reports[0]["weights"] == weights
    for asked in ("fp8", "float32"):
        assert plan(["--model", str(tmp_path / "orbax"), "--weights", asked, *flags]) == 2
        err = capsys.readouterr().err
        assert (
            f"--weights is {asked}; {tmp_path / 'orbax'} has {weights} weights" in err
            and err.count("\n") == 1
        )
    assert plan(["--model", str(tmp_path / "orbax"), "--suggest", "2", *flags]) == 0
    assert {row["weights"] for row in json.loads(capsys.readouterr().out)} == {weights}


# ---- what cannot be done


def test_what_is_refused_is_one_line(
    wide: Path,
    converted: Callable[[Path, str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    quantized = str(converted(wide, "int8"))
    target = f"{tmp_path}/x"
    for arguments, said in (
        ([quantized, target], "is converted already"),
        ([quantized, target, "--weights", "int8"], "is converted already"),
        ([quantized, target, "--weights", "int4"], "is converted already"),
        ([quantized, target, "--to", "hf"], "has int8 weights; the source's are not in it"),
        (
            [str(BUNDLED), target, "--to", "hf", "--weights", "int8"],
            "--to hf writes no quantized weights",
        ),
        ([str(BUNDLED), target, "--weights", "int3"], "--weights is int3; choose auto, int8"),
        ([str(BUNDLED), target, "--weights", "int8+head"], "no head beside its embedding"),
        ([str(BUNDLED), target, "--weights", "int4-g128"], "sums 96 numbers, no multiple of 128"),
    ):
        assert main(arguments) == 2
        err = capfd.readouterr().err
        assert said in err and err.startswith("error: ") and err.count("\n") == 1
        assert not list(tmp_path.iterdir())


def chunk_of(folder: Path, name: str) -> Path:
    return next(path for path in sorted(folder.glob(f"orbax/*/{name}/c/**/*")) if path.is_file())


def said_to_be(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | fields))


def without(folder: Path, name: str) -> None:
    """Remove a parameter from the folder and the manifest."""
    shutil.rmtree(next(folder.glob(f"orbax/*/{name}")))
    manifest = json.loads((folder / MANIFEST).read_text())
    files = {path: file for path, file in manifest["files"].items() if f"/{name}/" not in path}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"files": files}))


VALUES = "layers.1.qkv.values"
SCALES = "layers.0.down.scales"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: flip(chunk_of(folder, VALUES)),
            rf"{VALUES}/c/\S+: its sha256 is not that of manifest.json",
        ),
        (
            lambda folder: flip(chunk_of(folder, SCALES)),
            rf"{SCALES}/c/\S+: its sha256 is not that of manifest.json",
        ),
        (
            lambda folder: chunk_of(folder, SCALES).unlink(),
            rf"{SCALES}/c/\S+: No such file or directory, and manifest",
        ),
        (
            lambda folder: without(folder, SCALES),
            rf"int4-g32 weights of manifest.json, does not fit .*: {SCALES} are",
        ),
        (
            lambda folder: without(folder, VALUES),
            rf"int4-g32 weights of manifest.json, does not fit .*: {VALUES} are",
        ),
        (
            lambda folder: said_to_be(folder, weights="auto"),
            r"config.json does not fit the stored .*: layers.0.down,",
        ),
        (
            lambda folder: said_to_be(folder, weights="int4-g32+head"),
            r"does not fit the stored .*: head, head.scales,",
        ),
        (
            lambda folder: said_to_be(folder, weights="int8"),
            r"manifest.json: says int8 weights, but layers.0.down.values is int4 \[512, 128\], "
            r"not int8",
        ),
        (
            lambda folder: said_to_be(folder, weights="int4-g64"),
            r"manifest.json: says int4-g64 weights, but layers.0.down.scales is float32 \[16, "
            r"128\], not float32 \[8,",
        ),
        (
            lambda folder: said_to_be(folder, weights="int3"),
            r"manifest.json: weights in 'int3' are not known here",
        ),
        (
            lambda folder: said_to_be(folder, weights=4),
            r"manifest.json: weights in '4' are not known here",
        ),
    ],
)
def test_damage_is_refused_with_the_name_of_the_file(
    spoil: Callable[[Path], None],
    said: str,
    wide: Path,
    converted: Callable[[Path, str], Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(converted(wide, "int4-g32"), folder)
    spoil(folder)
    with pytest.raises((CheckpointError, ModelError), match=said) as error:
        load_params(open_checkpoint(folder), mesh())
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("name", "byte"), [("layers.0.o.values", 0x7F), ("layers.0.o.scales", 0xFF)]
)
def test_nan_is_refused(
    name: str, byte: int, wide: Path, converted: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    """NaN is refused in fp8 numbers and in scales, even when the hashes are right."""
    folder = tmp_path / "spoiled"
    shutil.copytree(converted(wide, "fp8"), folder)
    data = bytearray(chunk_of(folder, name).read_bytes())
    data[:4] = bytes([byte] * 4)
    chunk_of(folder, name).write_bytes(data)
    (folder / MANIFEST).unlink()
    write_manifest(folder, {}, "fp8")
    with pytest.raises(
        CheckpointError, match=rf"tensor '{name}': \d of .* values are NaN or infinite"
    ):
        load_params(open_checkpoint(folder), mesh())


def test_a_shard_reads_its_own_files(wide: Path, converted: Callable[[Path, str], Path]) -> None:
    """A device's quarter of the query heads is stored in files of its own."""
    checkpoint = open_checkpoint(converted(wide, "int4"))
    assert isinstance(checkpoint, OrbaxCheckpoint)
    stored = checkpoint.tensors["layers.0.o.values"]
    quarter = stored[slice(2, 4), slice(0, 64), slice(0, 128)]
    assert (
        0
        < len(stored._checked) * 4
        == len(list(stored._chunks((slice(0, 8), slice(0, 64), slice(0, 128)))))
    )
    direct = load_params(open_checkpoint(wide), mesh(), weights="int4")["layers"][0]["o"].values
    np.testing.assert_array_equal(quarter.astype(np.int8), np.asarray(direct)[2:4].astype(np.int8))


def test_every_form_has_a_name_that_is_stored() -> None:
    for name in (*SCHEMES, "int8+head"):
        assert str(parse_scheme(name)) == name
