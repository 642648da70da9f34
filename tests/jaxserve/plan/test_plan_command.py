"""The command: what it says of what fits, of what does not, and of what cannot be."""

import json
from pathlib import Path

import pytest

from jaxserve.plan.__main__ import main
from jaxserve.plan.topology import parse
from tests.slow_cases import slow_but

PUBLISHED = Path(__file__).parents[2] / "published" / "configs"
COUNT = ("--no-compile", "--topology")


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(flags)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_pod_of_v5e(capsys: pytest.CaptureFixture[str]) -> None:
    """All figures of a device add up to what it has; weights are a sixteenth, but every kv head is
    there twice.
    """
    code, out, err = plan(
        capsys, "--model", "llama3.1-8b", *COUNT, "v5e:4x4", "--price", "1.2", "--json"
    )
    told = json.loads(out)
    assert code == 0 and err == "" and told["fits"]
    memory = told["memory"]
    parts = ("weights", "rows", "pages", "temporaries", "programs", "spare")
    assert sum(memory[part] for part in parts) == memory["limit"] == 15.75 * 2**30
    copied = 2 * 32 * 2 * 8 * 4096 * 128  # bytes, of K and V in 32 layers
    assert memory["weights"] * 16 == pytest.approx(2 * told["parameters"] + copied, rel=1e-3)
    cache = told["cache"]
    assert cache["tokens_per_lane"] == cache["pages"][0] * 64
    assert memory["pages"] == cache["tokens_per_lane"] * 32 * 2 * 128 * 2, (
        "a device holds one of the heads"
    )
    batch = told["batches"][-1]
    assert batch["usd"] == pytest.approx(1.2 * 16 / 3600 / batch["tokens_per_second"] * 1e6)
    assert batch["tokens_per_second"] * batch["tpot"] == pytest.approx(batch["streams"])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        capsys, "--model", "gemma3-27b", *COUNT, "h200x2", "--data", "2", "--price", "3"
    )
    assert code == 0 and "It fits" in out and "USD" in out and "NVIDIA H200" in out
    assert "27,009.3 M parameters" in out and "a ceiling is no forecast" in out.lower()


def test_states_and_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    """A slot of 48 layers has 48 x 128 x 128 numbers and 3 x 10,240 inputs in each."""
    config = str(PUBLISHED / "Qwen--Qwen3.5-27B.json")
    code, out, _ = plan(capsys, config, *COUNT, "h200x2", "--tensor", "2")
    assert code == 0
    slot = 48 * (48 * 128 * 128 + 3 * 10_240) * 4
    assert f"A slot of states takes {slot / 1e6:.1f} MB on all of its devices together" in out
    assert "as the pages of 2,394 tokens do" in out
    assert "Computing 2,048 tokens again, which a snapshot of a long prompt saves" in out


@pytest.mark.parametrize("as_json", [False, True])
def test_what_does_not_fit(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "llama3.1-70b", *COUNT, "v5e:2x2", *(("--json",) if as_json else ()))
    code, out, _ = plan(capsys, *flags)
    assert code == 1
    if as_json:
        told = json.loads(out)
        assert told["fits"] is False and 17 < told["missing"] / 2**30 < 18
    else:
        assert (
            out.startswith("It does not fit")
            and "every device lacks 17." in out
            and out.count("\n") == 1
        )


def test_a_cache_that_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        capsys, "--model", "llama3.1-8b", *COUNT, "v5e:2x2", "--cache-tokens", "10000000"
    )
    assert code == 1 and "--cache-tokens asks for" in out


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_pages_of_8_bits(kv: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A head of 128 takes 132 bytes with its scale instead of 256; capacity and floors follow."""
    found = []
    for pages in ("auto", kv):
        flags = ("--prefer", "throughput", "--max-batch", "512", "--json", "--kv", pages)
        _, out, _ = plan(capsys, "--model", "llama3.1-8b", *COUNT, "h200", *flags)
        found.append(json.loads(out))
    whole, small = found
    assert (whole["kv"], small["kv"], small["weights"], small["cache"]["page_size"]) == (
        "bfloat16",
        kv,
        "bfloat16",
        128,
    )
    held = [each["cache"]["tokens_per_lane"] for each in found]
    assert held[1] / held[0] == pytest.approx(256 / 132, rel=0.01)
    saved = whole["steps"][0]["bytes"] - small["steps"][0]["bytes"]
    assert saved == (whole["context"] + 1) * 32 * 8 * 2 * (256 - 132)


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
def test_bytes_of_quantized_weights(
    weights: str, bits: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers in so many bits, with a float32 scale per output channel; embedding, head and norms in
    16.
    """
    memory = {
        name: json.loads(
            plan(capsys, "--model", "llama3.1-8b", *COUNT, "h200", "--json", "--weights", name)[1]
        )["memory"]
        for name in ("bfloat16", weights)
    }
    layer = 4096 * (6144 + 2 * 14336) + 4096 * 4096 + 14336 * 4096
    channels = 6144 + 2 * 14336 + 4096 + 4096
    saved = 32 * (layer * (16 - bits) // 8 - channels * 4)
    assert memory["bfloat16"]["weights"] - memory[weights]["weights"] == saved


def test_products_of_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Prefill is bound by products: half of the time, but for attention and the head."""
    found = {}
    for weights in ("int8", "w8a8-int8", "w8a8-fp8"):
        _, out, _ = plan(
            capsys, "--model", "llama3.1-8b", *COUNT, "h200", "--weights", weights, "--json"
        )
        found[weights] = json.loads(out)
    ttft, tpot = (
        {name: told["floors"][what] for name, told in found.items()} for what in ("ttft", "tpot")
    )
    assert 0.5 < ttft["w8a8-int8"] / ttft["int8"] < 0.55 and ttft["w8a8-fp8"] == ttft["w8a8-int8"]
    assert tpot["w8a8-int8"] == tpot["int8"] and found["w8a8-int8"]["weights"] == "w8a8-int8"
    _, out, _ = plan(capsys, "--model", "llama3.1-8b", *COUNT, "v5e:2x2", "--weights", "w8a8-int8")
    assert "197 TFLOP/s" in out and "394 of int8" in out


BAD = {
    "a mesh that does not match": (
        ("h200x4", "--tensor", "2"),
        "mesh 1x1x2 (--data, --expert, --tensor) has 2 devices",
    ),
    "a mesh that is too large": (("h200x4", "--data", "8"), "has 8 devices; h200x4 has 4"),
    "heads that do not divide": (("h200x6",), "does not divide by mesh axis 'tensor' of size 6"),
    "no such topology": (("v5e:3x5",), "slices of v5e are"),
    "a fraction of a TPU": (
        ("v5e:2x2", "--memory-fraction", "0.5"),
        "--memory-fraction is for GPUs",
    ),
    "weights that are not served": (
        ("h200", "--weights", "int3"),
        "--weights is int3; choose",
    ),
    "products that a chip does not have": (
        ("v6e:2x2", "--weights", "w8a8-fp8"),
        "--weights is w8a8-fp8; TPU v6 lite does not multiply fp8 numbers with each other (choose "
        "fp8, which",
    ),
    "pages of no such kind": (
        ("h200", "--kv", "int4"),
        "--kv is int4; choose one of auto, float32, bfloat16, int8, fp8",
    ),
    "pages of more digits": (
        ("h200", "--kv", "float32"),
        "--kv is float32; keys and values of bfloat16 weights",
    ),
    "pages of 8 bits that a kernel cannot take": (
        ("v5e:2x2", "--kv", "int8", "--page-size", "64", "--attention", "tpu"),
        "pages of 64 tokens of int8: on a TPU the size is a multiple of 128 (--page-size, or "
        "--attention reference)",
    ),
    "a kernel of another chip": (("h200", "--attention", "tpu"), "attention 'tpu' runs on 'tpu'"),
    "a plot that cannot be written": (
        ("h200", "--plot", "/nowhere/plot.svg"),
        "--plot is /nowhere/plot.svg; no file can",
    ),
    "a context beyond the model's": (
        ("h200", "--max-context", "1000000"),
        "--max-context is 1000000",
    ),
    "a draft model": (
        ("v5e:2x2", "--speculate", "draft"),
        "--speculate is draft; a draft model's weights, pages and steps are not planned",
    ),
}


@pytest.mark.parametrize(("flags", "problem"), BAD.values(), ids=list(BAD))
def test_bad_input_is_one_line(
    flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = plan(capsys, "--model", "llama3.1-8b", *COUNT, *flags)
    assert code == 2 and out == "" and problem in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--data", "0", "a whole number from 1 to 2147483647"),
        ("--expert", "-1", "a whole number from 1 to 2147483647"),
        ("--tensor", "x", "a whole number from 1 to 2147483647"),
        ("--price", "-1", "a finite number above 0"),
    ],
)
def test_numbers_that_are_none_are_one_line(
    flag: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("--model", "llama3.1-8b", *COUNT, "h200", flag, value))
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith(f"error: argument {flag}: '{value}' is not {expected}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
            "rope_type 'spiral' is not implemented",
        ),
        ({"routing": "by dice"}, "does not understand: routing"),
        ({"architectures": ["NobodyForCausalLM"]}, "are not implemented"),
    ],
)
def test_a_config_that_is_not_understood(
    change: dict, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(
        (Path(__file__).parents[3] / "jaxserve/plan/configs/llama3.1-8b.json").read_text()
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | change))
    code, _, err = plan(capsys, "--model", str(path), *COUNT, "h200")
    assert code == 2 and problem in err and err.count("\n") == 1


def test_without_a_compiler_it_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever compilers there are here: jax says so when there is none."""

    def missing(**_: object) -> None:
        raise RuntimeError("TPU support not installed.\nSee the manual.")

    monkeypatch.setattr("jaxserve.sharding.aot_devices.topologies.get_topology_desc", missing)
    flags = ("--model", "llama3.1-8b", "--topology", "v5e:2x2")
    code, out, err = plan(capsys, *flags)
    assert code == 0 and err.startswith("counted only: ") and err.count("\n") == 1
    assert "pip install '.[compilers]'" in err
    assert (code, out) == plan(capsys, *flags, "--no-compile")[:2]
    code, out, err = plan(capsys, *flags, "--out", str(tmp_path / "bundle"))
    assert code == 2 and out == "" and "pip install '.[compilers]'" in err


def test_more_context_than_pages(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--cache-tokens", "8192", "--context", "2048", "--json")
    _, out, _ = plan(capsys, "--model", "llama3.1-8b", *COUNT, "h200", *flags)
    assert [batch["held"] for batch in json.loads(out)["batches"]] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert parse("h200").count == 1


@pytest.mark.parametrize(
    "name",
    slow_but(("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3"), ("gpt-oss-120b",)),
)
def test_mixtures_of_experts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On 64 chips all of them fit some mesh, and the best ones split experts or whole layers."""
    flags = ("--topology", "v5p:4x4x4", "--suggest", "--all", "--no-compile")
    assert main(("--model", name, *flags, "--weights", "bfloat16")) == 0
    assert "lacks" in capsys.readouterr().out or name != "deepseek-v3"
