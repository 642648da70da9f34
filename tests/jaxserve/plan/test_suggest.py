"""Rankings of meshes: all of them are tried, and the best by the stated measure comes first."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.plan.__main__ import main
from jaxserve.plan.model_config import read_config
from jaxserve.plan.suggest import meshes

ROW = re.compile(r"^ *\dx\dx\d .*$", re.M)
PRICED = ("--suggest", "--no-compile", "--price", "4", "--allow-quantized")


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as on a terminal of 80 columns."""
    monkeypatch.setattr("jaxserve.plan.program.WIDTH", 80)


def suggest(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> list[dict[str, Any]]:
    assert main((*flags, "--suggest", "--no-compile", "--json")) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("devices", [1, 8, 12])
def test_all_meshes_are_tried_once(devices: int) -> None:
    found = list(meshes(devices))
    assert len(set(found)) == len(found) and all(axes.size == devices for axes in found)
    ways = sum(
        math.prod((d, e)) <= devices and devices % (d * e) == 0
        for d in range(1, 13)
        for e in range(1, 13)
    )
    assert len(found) == ways


def test_a_large_model_has_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    """140 GB on 16 chips of 16 GiB: only all together hold it; the rest is told what it lacks, the
    least first.
    """
    flags = ("--model", "llama3.1-70b", "--topology", "v5e:4x4", "--price", "1.2")
    first, *rest = suggest(capsys, *flags, "--weights", "bfloat16", "--kv", "bfloat16")
    assert (
        first["mesh"] == {"data": 1, "expert": 1, "tensor": 16} and first["weights"] == "bfloat16"
    )
    assert first["usd"] == pytest.approx(1.2 * 16 / 3600 / first["tokens_per_second"] * 1e6)
    assert len(rest) == 4 and not any(choice["fits"] for choice in rest)
    assert [choice["missing"] for choice in rest] == sorted(choice["missing"] for choice in rest)


def test_quantized_weights_are_tried_too(capsys: pytest.CaptureFixture[str]) -> None:
    """With --allow-quantized half and a quarter of the bytes are tried, which bound the times."""
    flags = (
        "--model",
        "llama3.1-70b",
        "--topology",
        "v5e:4x4",
        "--kv",
        "bfloat16",
        "--prefer",
        "latency",
    )
    assert {choice["weights"] for choice in suggest(capsys, *flags)} == {"bfloat16"}
    found = suggest(capsys, *flags, "--allow-quantized")
    tpot = {
        choice["weights"]: choice["tpot"]
        for choice in found
        if choice["fits"] and choice["mesh"]["tensor"] == 16
    }
    assert list(tpot) == ["int4-g128", "int8", "bfloat16"]
    assert tpot["int8"] < 0.6 * tpot["bfloat16"] and tpot["int4-g128"] < 0.7 * tpot["int8"]


def test_pages_of_8_bits_are_tried_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Nearly twice the tokens in the same memory, unless pages were asked for."""
    flags = (
        "--model",
        "llama3.1-8b",
        "--topology",
        "h200",
        "--weights",
        "bfloat16",
        "--max-batch",
        "512",
    )
    assert {choice["kv"] for choice in suggest(capsys, *flags)} == {"bfloat16"}
    found = suggest(capsys, *flags, "--allow-quantized")
    tokens = {choice["kv"]: choice["tokens_per_lane"] for choice in found}
    assert tokens["int8"] / tokens["bfloat16"] == pytest.approx(256 / 132, rel=0.01)
    assert {choice["kv"] for choice in suggest(capsys, *flags, "--kv", "fp8")} == {"fp8"}


def test_latency_splits_the_model_and_throughput_the_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--model", "llama3.1-8b", "--topology", "h200x8", "--weights", "bfloat16")
    quick = suggest(capsys, *flags, "--prefer", "latency")
    assert quick[0]["mesh"]["tensor"] == 8
    assert [choice["tpot"] for choice in quick] == sorted(choice["tpot"] for choice in quick)
    busy = suggest(capsys, *flags, "--prefer", "throughput")
    assert busy[0]["mesh"]["data"] == 8 and {choice["weights"] for choice in busy} == {"bfloat16"}
    rates = [choice["tokens_per_second"] for choice in busy]
    assert rates == sorted(rates, reverse=True)


def test_a_form_without_a_kernel_pays_for_its_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """An H200 has a kernel for experts in int8, and none for int4 in groups of 128."""
    flags = ("--model", "qwen3-30b-a3b", "--topology", "h200x2", "--allow-quantized")
    found = suggest(capsys, *flags)
    copied = {choice["weights"] for choice in found if "experts" in choice["reference"]}
    assert copied == {"int4-g128"} and found[0]["weights"] == "int8"
    of_experts = {
        choice["weights"]: choice["tpot"]
        for choice in found
        if choice["mesh"]["tensor"] == 1 and choice["kv"] == "int8"
    }
    # A quarter of a byte per number is read, and two of a copy are written and read.
    assert of_experts["int4-g128"] > of_experts["bfloat16"] > of_experts["int8"]


def test_attention_without_a_kernel_pays_for_its_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """An H200 has no kernel for latent pages of 8 bits, whose reference moves more than bfloat16's
    kernel.
    """
    flags = ("deepseek-v3", "--topology", "h200x8", "--weights", "int8", "--allow-quantized")
    found = suggest(capsys, *flags)
    fitting = [choice for choice in found if choice["fits"]]
    assert {choice["kv"] for choice in fitting if "attention" in choice["reference"]} == {"int8"}
    assert fitting[0]["kv"] == "bfloat16" and fitting[0]["reference"] == []
    of_pages = {choice["kv"]: choice["tpot"] for choice in fitting if choice["mesh"]["tensor"] == 8}
    assert of_pages["int8"] > of_pages["bfloat16"]


def test_a_recurrence_without_a_kernel_pays_for_its_copies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("qwen3.5-27b", "--topology", "h200x2")
    by_kernel, found = (
        suggest(capsys, *flags, *more) for more in ((), ("--recurrence", "reference"))
    )
    assert all(choice["reference"] == [] for choice in by_kernel)
    assert all(choice["reference"] == ["recurrence"] for choice in found)
    assert found[0]["tpot"] > by_kernel[0]["tpot"]
    assert all(
        "recurrence" not in choice["reference"]
        for choice in suggest(capsys, "qwen3-8b", *flags[1:], "--recurrence", "reference")
    )


def test_an_estimate_says_what_has_no_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("llama3.1-8b", "--topology", "h200", "--no-compile")
    sizes = list[float]()
    for more in ((), ("--attention", "reference")):
        assert main((*flags, *more)) == 0
        out = capsys.readouterr().out
        line = "no kernel for attention: counted as the references move bytes"
        assert (line in out.splitlines()) == bool(more)
        assert main((*flags, *more, "--json")) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["reference"] == (["attention"] if more else [])
        sizes.append(next(step["bytes"] for step in told["steps"] if "decode" in step["step"]))
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        pytest.param("qwen3-30b-a3b --topology h200x2", set(), marks=pytest.mark.slow),
        pytest.param(
            "deepseek-v3 --topology h200x8 --weights int8", {"attention*"}, marks=pytest.mark.slow
        ),
        (
            "qwen3.5-27b --topology h200x2 --recurrence reference",
            {"attention*,", "recurrence*"},
        ),
    ],
)
def test_a_table_of_eight_rows_and_eighty_columns(
    capsys: pytest.CaptureFixture[str], narrow: None, words: str, notes: set[str]
) -> None:
    """With prices, and with notes of which two go on in a second line."""
    assert main([*words.split(), *PRICED]) == 0
    out, err = capsys.readouterr()
    assert len(ROW.findall(out)) == 8 and all(len(line) <= 80 for line in out.splitlines())
    assert "\u2026" not in out and "more with --all." in out and not err
    assert notes <= set(out.split())
    assert ("*: without a kernel on this chip" in out) == bool(notes)


def test_a_table_of_all_rows(capsys: pytest.CaptureFixture[str], narrow: None) -> None:
    flags = ("--topology", "h200x2", "--attention", "reference", *PRICED, "--all")
    assert main(["llama3.1-8b", *flags]) == 0
    out = capsys.readouterr().out
    assert len(ROW.findall(out)) == 12 and "attention*" in out.split()
    assert "*: without a kernel on this chip" in out


def test_flags_of_a_ranking_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--all", "--allow-quantized"):
        assert main(["llama3.1-8b", "--topology", "h200", "--no-compile", flag]) == 2
        assert f"{flag} is for --suggest" in capsys.readouterr().err


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = suggest(
        capsys, "--model", "llama3.1-70b", "--topology", "v5e:2x2", "--weights", "int8", code=1
    )
    assert found and not any(choice["fits"] for choice in found)


def test_no_mesh_divides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.json"
    path.write_text(
        json.dumps(read_config("llama3.1-8b")[1] | {"num_attention_heads": 7, "head_dim": 128})
    )
    path.write_text(
        path.read_text().replace('"num_key_value_heads": 8', '"num_key_value_heads": 7')
    )
    flags = ("--topology", "h200x8", "--suggest", "--no-compile")
    assert main(("--model", str(path), *flags)) == 0, "lanes need no division"
    capsys.readouterr()
    assert main(("--model", str(path), "--max-context", "10000000", *flags)) == 2
    assert (
        "--max-context is 10000000; the model takes at most 131072 tokens"
        in capsys.readouterr().err
    )


def test_without_compilers_the_first_ranking_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(**_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("jaxserve.sharding.aot_devices.topologies.get_topology_desc", missing)
    assert main(("--model", "llama3.1-8b", "--topology", "v6e:2x2", "--suggest")) == 0
    out, err = capsys.readouterr()
    assert "1x1x4" in out and re.search(r"^ *1x1x4 .* compiled", out, re.M) is None
    assert "pip install '.[compilers]'" in err and err.count("\n") == 1


def test_flags_that_a_ranking_has_no_use_for(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--tensor", "2"), ("--data", "2"), ("--plot", "x.svg"), ("--buckets", "all")):
        assert main(("--model", "llama3.1-8b", "--topology", "h200x2", "--suggest", *flags)) == 2
        assert f"leave {flags[0]} out" in capsys.readouterr().err


def test_a_cpu_has_no_published_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.plan.program.prepare_platform", lambda topology: None)
    assert main(("--model", "llama3.1-8b", "--topology", "cpux2", "--suggest")) == 2
    assert "is not published" in capsys.readouterr().err
