"""The planner with real compilers: a chip's usable memory, and two layers of a Llama.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

from jaxserve.plan.__main__ import main
from jaxserve.plan.model_config import read_config
from jaxserve.plan.topology import parse
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS, GIB
from tests.deviceless.attention_step import COMPILERS

TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]


def skip_without_compiler(chip: str) -> None:
    if importlib.util.find_spec(COMPILERS[CHIPS[chip].platform]) is None:
        pytest.skip(f"needs the compiler of {chip} (make deviceless)")


@pytest.mark.deviceless
@pytest.mark.parametrize("chip", TPUS)
def test_memory_that_programs_may_use(chip: str) -> None:
    """Known figures equal what libtpu reports when asked for too much, to 0.01 GiB."""
    skip_without_compiler(chip)
    known = CHIPS[chip]
    one = jax.sharding.SingleDeviceSharding(absent.devices(chip, 1)[0])
    large = jax.ShapeDtypeStruct((known.memory // 4,), jnp.float32, sharding=one)
    with pytest.raises(JaxRuntimeError) as caught:
        jax.jit(lambda x: x + 1).lower(large).compile()
    said = re.search(r"available HBM \(([\d.]+)G\)", str(caught.value))
    assert said and known.usable == int(float(said[1]) * GIB)


@pytest.fixture
def two_layer_config(tmp_path: Path) -> str:
    path = tmp_path / "two-layers.json"
    path.write_text(json.dumps(read_config("llama3.1-8b")[1] | {"num_hidden_layers": 2}))
    return str(path)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x2"),
        pytest.param("h200x1"),
        pytest.param("v6e:2x4", marks=pytest.mark.slow),
        pytest.param("v5p:2x2x1", marks=pytest.mark.slow),
        pytest.param("7x:2x2x1", marks=pytest.mark.slow),
        pytest.param("h200x2", marks=pytest.mark.slow),
    ],
)
def test_a_plan(topology: str, two_layer_config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments are the counted weights and state, and all-reduces have the counted bytes."""
    skip_without_compiler(parse(topology).family)
    flags = (
        "--topology",
        topology,
        "--buckets",
        "largest",
        "--prefer",
        "latency",
        "--max-context",
        "4096",
        "--json",
    )
    code = main(("--model", two_layer_config, *flags))
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["fits"] and report["memory"]["compiled"]
    memory = report["memory"]
    steps = {step["step"]: step for step in report["steps"] if "arguments" in step}
    counted = memory["weights"] + memory["rows"] + memory["pages"]
    for step in steps.values():
        assert counted <= step["arguments"] < 1.01 * counted
    n = report["mesh"]["tensor"]
    decode = steps["decode[4]"]
    sums = 5 * 4 * 4096 * 2 * 2 * (n - 1) / n  # of two layers and the embedding, in a ring
    assert decode["sent"].get("all-reduce", 0) == pytest.approx(sums)
    assert not decode["copies"]


@pytest.mark.deviceless
def test_a_cache_that_only_the_compiler_finds_too_large(
    two_layer_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache leaves 16 MiB to steps that need more."""
    skip_without_compiler("v5e")
    flags = ("--topology", "v5e:2x2", "--prefer", "latency", "--max-context", "4096", "--json")
    main(("--model", two_layer_config, "--no-compile", *flags))
    memory = json.loads(capsys.readouterr().out)["memory"]
    # Bytes: tokens, layers, K and V, heads of a device, and their numbers in bfloat16.
    page = 64 * 2 * 2 * 2 * 128 * 2
    left = memory["limit"] - memory["weights"] - memory["rows"] - 2**24
    tokens = str(left // page * 64)
    code = main(
        ("--model", two_layer_config, "--buckets", "largest", "--cache-tokens", tokens, *flags)
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 1 and report["fits"] is False
    assert report.get("missing", 0) > 0 or report["memory"]["spare"] < 0
