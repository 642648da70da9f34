"""Bundles: compiled in one process, found in another; and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineOptions, StateSize, resolve
from jaxserve.errors import ConfigError
from jaxserve.plan.__main__ import main
from jaxserve.plan.bundle import (
    Manifest,
    check_engine,
    engine_fields,
    hashes,
    open_bundle,
    spec_hash,
)
from jaxserve.plan.bundle_folder import CACHE, MANIFEST, check_free
from jaxserve.plan.platform import environment
from jaxserve.server.flags import parse
from jaxserve.server.model_loader import check_bundle
from tests.jaxserve.engine.tiny import SPEC

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "checkpoints" / "bundled" / "tiny-chat-draft")
CONFIG = resolve(
    EngineOptions(max_batch=2, cache_tokens=4096), max_positions=96, lanes=1, affordable_tokens=0
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """One of two entries that nothing was compiled for."""
    (tmp_path / CACHE).mkdir()
    for name in ("jit_run-1-cache", "jit_run-2-cache"):
        (tmp_path / CACHE / name).write_bytes(name.encode())
    manifest = Manifest(
        model="tiny",
        spec=spec_hash(SPEC),
        dtype="float32",
        topology="cpu",
        device_kind="cpu",
        mesh={"data": 1, "expert": 1, "tensor": 1},
        engine=engine_fields(CONFIG),
        steps=["decode[1]"],
        environment=environment("cpu"),
        entries=hashes(tmp_path / CACHE),
    )
    (tmp_path / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return tmp_path


def edit(bundle: Path, **changes: Any) -> None:
    told = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps(told | changes))


def test_a_whole_bundle_opens_and_leads_to_the_same_engine(bundle: Path) -> None:
    manifest = open_bundle(bundle)
    again = resolve(manifest.options(), max_positions=96, lanes=1, affordable_tokens=0)
    assert again == CONFIG
    check_engine(manifest, SPEC, "float32", "cpu", again)


@pytest.mark.parametrize(
    "asked",
    [
        {"speculate": "ngram"},
        {"speculate": "ngram", "draft_tokens": 3},
        {"grouped_matmul": "reference", "quantized_matmul": "reference", "attention": "reference"},
        {"deterministic": True, "kv": "int8"},
        {"prefix_cache": False, "decode_steps": 4, "prefer": "throughput"},
        {"page_exchange": True, "page_size": 16, "step_tokens": 32},
    ],
    ids=str,
)
def test_every_option_that_a_bundle_was_made_with_is_asked_for_again(
    bundle: Path, asked: dict[str, Any]
) -> None:
    options = EngineOptions(max_batch=2, cache_tokens=4096, **asked)
    made = resolve(options, max_positions=96, lanes=1, affordable_tokens=0)
    edit(bundle, engine=engine_fields(made))
    manifest = open_bundle(bundle)
    again = resolve(manifest.options(), max_positions=96, lanes=1, affordable_tokens=0)
    assert again == made
    check_engine(manifest, SPEC, "float32", "cpu", again)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"snapshot_share": 0.5, "snapshot_interval": 128, "snapshot_answers": False},
        {"max_batch": 256, "cache_tokens": 8192},
    ],
    ids=str,
)
def test_slots_and_snapshots_are_part_of_it(bundle: Path, asked: dict[str, Any]) -> None:
    sizes = {"max_positions": 96, "lanes": 1, "affordable_tokens": 0}
    states = [StateSize(64, 1)]
    options = EngineOptions(**{"max_batch": 2, "cache_tokens": 4096} | asked)
    made = resolve(options, states=states, **sizes)
    edit(bundle, engine=engine_fields(made))
    manifest = open_bundle(bundle)
    again = resolve(manifest.options(), states=states, **sizes)
    assert again == made
    check_engine(manifest, SPEC, "float32", "cpu", again)


def test_the_pages_are_part_of_it(bundle: Path) -> None:
    manifest = open_bundle(bundle)
    other = resolve(
        replace(manifest.options(), kv="int8"), max_positions=96, lanes=1, affordable_tokens=0
    )
    with pytest.raises(ConfigError, match="is for kv float32; the engine has int8"):
        check_engine(manifest, SPEC, "float32", "cpu", other)
    options = parse(["--kv", "int8"])
    with pytest.raises(
        ConfigError, match=r"--kv is int8; the bundle was compiled for float32 \(leave it out\)"
    ):
        check_bundle(options, manifest)
    check_bundle(parse(["--kv", "auto"]), manifest)


def refused(bundle: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_bundle(bundle)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_entries_that_are_not_those_of_the_manifest(bundle: Path) -> None:
    entry = bundle / CACHE / "jit_run-2-cache"
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] + b"!")
    assert "jit_run-2-cache has another hash" in refused(bundle)
    entry.unlink()
    assert "jit_run-2-cache is missing" in refused(bundle)
    entry.write_bytes(whole)
    (bundle / CACHE / "jit_run-3-cache").write_bytes(b"")
    assert "jit_run-3-cache is not in the manifest" in refused(bundle)
    shutil.rmtree(bundle / CACHE)
    assert "its cache cannot be read: No such file" in refused(bundle)


@pytest.mark.parametrize(
    "name", ["jax", "jaxlib", "jaxserve", "compression", "flags", "cpu_kernels"]
)
def test_another_version(bundle: Path, name: str) -> None:
    edit(bundle, environment=environment("cpu") | {name: "other"})
    assert f"was compiled with {name} other, and here is" in refused(bundle)


def test_a_manifest_that_is_none(bundle: Path) -> None:
    whole = (bundle / MANIFEST).read_text()
    edit(bundle, format=1)
    assert "of another version of bundles" in refused(bundle)
    told = json.loads(whole)
    of_engine = [
        told["engine"] | change
        for change in ({"max_batch": "four"}, {"pools": [3]}, {"pools": [{}]}, {"pools": []})
    ]
    for broken in (
        *(
            {"entries": []},
            {"mesh": {"data": 1}},
            {"mesh": told["mesh"] | {"tensor": "2"}},
            {"more": 1},
        ),
        *({"device_kind": 3}, {"engine": {}}, *({"engine": engine} for engine in of_engine)),
    ):
        (bundle / MANIFEST).write_text(json.dumps(told | broken))
        assert "manifest.json is not one" in refused(bundle)
    (bundle / MANIFEST).write_text(whole[:-5])
    assert "not valid JSON" in refused(bundle)
    (bundle / MANIFEST).unlink()
    assert "No such file" in refused(bundle)


def test_another_engine(bundle: Path) -> None:
    manifest = open_bundle(bundle)
    other = resolve(
        EngineOptions(max_batch=4, cache_tokens=4096),
        max_positions=96,
        lanes=1,
        affordable_tokens=0,
    )
    for arguments, problem in (
        ((SPEC, "bfloat16", "cpu", CONFIG), "is for weights in float32"),
        ((SPEC.on(4), "float32", "cpu", CONFIG), "is for a model with the hash"),
        ((SPEC, "float32", "TPU v5 lite", CONFIG), "is for devices of kind cpu"),
        ((SPEC, "float32", "cpu", CONFIG, "int8"), "is for --weights auto; here it is int8"),
        ((SPEC, "float32", "cpu", other), "is for max_batch 2; the engine has 4"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_engine(manifest, *arguments)


def test_flags_beside_a_bundle(bundle: Path) -> None:
    """Flags that agree are accepted; an error for others names what was compiled."""
    manifest = open_bundle(bundle)
    check_bundle(parse([]), manifest)
    check_bundle(parse(["--max-batch", "2", "--dtype", "float32"]), manifest)
    for flag, asked in (
        *(("max-batch", "3"), ("dtype", "bfloat16"), ("weights", "int8")),
        *(("tensor", "2"), ("prefer", "latency")),
    ):
        flags = [f"--{flag}", asked]
        with pytest.raises(ConfigError, match=f"{' is '.join(flags)}; the bundle was compiled for"):
            check_bundle(parse(flags), manifest)
    with pytest.raises(ConfigError, match="--compilation-cache is x; "):
        check_bundle(parse(["--compilation-cache", "x"]), manifest)


def test_bundles_that_are_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", str(tmp_path))
    assert main(("--model", "llama3.1-8b", "--topology", "h200", *out)) == 2
    assert "is not tuned for it" in capsys.readouterr().err
    assert main(("--model", "llama3.1-8b", "--topology", "v5e:2x2", "--no-compile", *out)) == 2
    assert "leave --out out" in capsys.readouterr().err
    assert (
        main(("--model", "llama3.1-8b", "--topology", "v5e:2x2", "--buckets", "largest", *out)) == 2
    )
    assert "--out keeps every step" in capsys.readouterr().err


def serve(bundle: Path) -> list[str]:
    """Return what a server prints until it is ready, or ends."""
    flags = ("--bundle", str(bundle), "--port", "0", "--http-port", "0")
    command = (sys.executable, "-m", "jaxserve.serve", "--model", MODEL, *flags)
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            lines.append(line.rstrip())
            if line.startswith("ready:"):
                process.terminate()
    return lines


@pytest.mark.system
@pytest.mark.slow
def test_compiled_in_one_process_and_found_in_another(tmp_path: Path) -> None:
    """All of it; but for an entry that somebody took out, which is named and not put back."""
    folder = tmp_path / "bundle"
    sizes = (
        "--max-batch",
        "2",
        "--step-tokens",
        "32",
        "--max-context",
        "128",
        "--weights",
        "float32",
    )
    command = (sys.executable, "-m", "jaxserve.plan", "--model", MODEL, "--topology", "cpu", *sizes)
    subprocess.run((*command, "--out", str(folder)), cwd=ROOT, check=True, capture_output=True)
    lines = serve(folder)
    assert "9 of 9 steps and writers of rows found in the bundle" in lines
    assert not [line for line in lines if "not found" in line]
    told = json.loads((folder / MANIFEST).read_text())
    taken = next(name for name in told["entries"] if name.startswith("jit_admit_row"))
    (folder / CACHE / taken).unlink()
    edit(
        folder, entries={name: digest for name, digest in told["entries"].items() if name != taken}
    )
    lines = serve(folder)
    assert "8 of 9 steps and writers of rows found in the bundle" in lines
    assert "not found in the bundle, so compiled here: admit_row" in lines
    assert not (folder / CACHE / taken).exists()
    again = subprocess.run(
        (*command, "--out", str(folder)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.returncode == 2 and "there is a bundle or a file already" in again.stderr


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--out is /dev/null/x; no folder can be made there: Not"
    ):
        check_free(Path("/dev/null/x"))
    check_free(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
