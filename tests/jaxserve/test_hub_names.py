"""Commands and LLM with a model's name on the hub, from a hub of our own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve.bench.flags import parse as parse_bench
from jaxserve.bench.offline_cases import Case, engine_of
from jaxserve.checkpoints.hub.names import model_of_flag
from jaxserve.cluster.hosts import Hosts
from jaxserve.convert import main as convert
from jaxserve.errors import MemoryLimitError, ModelError
from jaxserve.llm_folder import Room, model_of_llm, open_llm
from jaxserve.loading.model_folder import described
from jaxserve.plan.__main__ import main as plan
from jaxserve.serve import run as serve
from jaxserve.server.flags import ServeOptions
from jaxserve.server.model_loader import ModelLoader
from jaxserve.sharding.mesh import MeshSpec
from tests.fake_hub import FakeHub, fake_hub
from tests.jaxserve.generate_harness import BUNDLED, ROOT, STORY, Call, assert_refused, caller

NAME = "some/tiny-draft"
CONFIG = json.loads((BUNDLED / "config.json").read_text())
HUGE = {"hidden_size": 2**17, "intermediate_size": 2**19, "num_hidden_layers": 200}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hub") as hub:
        hub.add(NAME, BUNDLED)
        yield hub


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(capsys)


def with_config(hub: FakeHub, **changes: object) -> str:
    """Add a model with another config.json, and return its name."""
    hub.add("some/other", BUNDLED, config__json=json.dumps(CONFIG | changes).encode())
    return "some/other"


def room(dtype: str = "auto", weights: str = "auto") -> Room:
    return Room(MeshSpec().build(jax.devices()[:1]), dtype, weights)


def lacking(name: str, room: Room) -> int:
    """Return the bytes that a device lacks for a model that is not fetched."""
    with pytest.raises(MemoryLimitError) as error:
        model_of_llm(name, room, lambda *_: None)
    return error.value.missing


def test_generate(hub: FakeHub, call: Call) -> None:
    flags = ["--prompt", STORY, "--max-tokens", "8", "--temperature", "0"]
    code, out, _ = call(*flags, model=f"{NAME}@main")
    assert code == 0 and (0, out) == call(*flags)[:2]


def test_a_name_that_the_hub_does_not_have(hub: FakeHub, call: Call) -> None:
    assert_refused(call("--prompt", STORY, model="some/tiny-draff"), f"did you mean {NAME}?")
    assert_refused(call("--prompt", STORY, model="no-such-folder"), "org/name of the hub")


def test_a_name_is_looked_up_before_jax_is_imported(hub: FakeHub, tmp_path: Path) -> None:
    script = (
        "import sys; from jaxserve.programs import start; "
        "code = start(['generate', 'some/thing', 'x']); "
        "sys.exit(3 if 'jax' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=_environment(hub, tmp_path), capture_output=True
    )
    assert done.returncode == 2 and b"no such model" in done.stderr


def test_variables_as_users_know_them(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[NAME].reader = "hf_secret"
    script = (
        "import sys; from jaxserve.checkpoints.hub import names, lookup, files; "
        "model = names.hub_model(sys.argv[1]); "
        "print(files.fetch(lookup.find(model), lambda *told: None))"
    )
    environment = _environment(hub, tmp_path)

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, NAME]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True)

    assert "private (give HF_TOKEN)" in run().stderr
    first = run(HF_TOKEN="hf_secret")
    assert Path(first.stdout).is_relative_to(tmp_path / "home"), first.stderr
    hub.requests.clear()
    again = run(HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout and hub.requests == [], again.stderr


def _environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }


def test_plan_reads_the_config_alone(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([NAME, "--topology", "v5e:2x4", "--no-compile", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["model"] == NAME
    assert set(hub.fetched("GET", "HEAD")) == {"config.json"}


def test_convert(hub: FakeHub, tmp_path: Path, call: Call) -> None:
    target = tmp_path / "converted"
    assert convert([NAME, str(target)]) == 0
    flags = ["--prompt", STORY, "--max-tokens", "8", "--temperature", "0"]
    assert call(*flags, model=target)[:2] == call(*flags)[:2]


def test_bench_reads_the_context_of_the_model(hub: FakeHub) -> None:
    options = parse_bench(["offline", "--model", NAME])
    assert engine_of(options, [Case("tg", 1, 4, 4, counted=4)]).max_context == 8


def test_clients_know_the_model_by_its_name(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(options: ServeOptions, hosts: Hosts) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("jaxserve.server.program.run", run)
    assert serve(ServeOptions(model=model_of_flag(NAME))) == 0
    (found,) = seen
    assert str(found.model) == f"{NAME}@{hub.repos[NAME].commit}"
    loader = ModelLoader(found, None, None, None, None)  # type: ignore[arg-type]
    assert loader.model_name == NAME


def test_an_unknown_architecture_is_not_fetched(hub: FakeHub, call: Call) -> None:
    name = with_config(hub, architectures=["MambaForCausalLM"])
    assert_refused(call("--prompt", STORY, model=name), "'MambaForCausalLM'] are not implemented")
    assert set(hub.fetched("GET", "HEAD")) == {"config.json"}
    with pytest.raises(ModelError, match="not implemented"):
        model_of_llm(name, room(), lambda *_: None)


def test_weights_that_cannot_fit_are_not_fetched(hub: FakeHub, call: Call) -> None:
    name = with_config(hub, **HUGE)
    assert_refused(call("--prompt", STORY, model=name), "so nothing is fetched")
    assert set(hub.fetched("GET", "HEAD")) == {"config.json"}
    sizes = [lacking(name, room("float32", weights)) for weights in ("auto", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# Fields of config.json, and the dtype that is counted.
COUNTED = [
    ({"dtype": None, "torch_dtype": "float32"}, "float32"),
    ({"dtype": "float64"}, "float32"),
    ({"dtype": "float16"}, "bfloat16"),
    ({"dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": None, "torch_dtype": None}, "bfloat16"),
    ({"dtype": "float32", "quantization_config": FP8}, "bfloat16"),
]


@pytest.mark.parametrize(("fields", "dtype"), COUNTED, ids=str)
def test_auto_counts_what_config_json_says(
    hub: FakeHub, fields: dict[str, object], dtype: str
) -> None:
    name = with_config(hub, **HUGE, **fields)
    assert lacking(name, room()) == lacking(name, room(dtype))


def test_the_error_names_the_smaller_dtype(hub: FakeHub) -> None:
    for dtype, is_named in (("float32", True), ("bfloat16", False)):
        name = with_config(hub, **HUGE, dtype=dtype)
        with pytest.raises(MemoryLimitError) as error:
            model_of_llm(name, room(), lambda *_: None)
        assert ("--dtype bfloat16 or --weights" in str(error.value)) == is_named


@pytest.mark.parametrize("model", [NAME, str(BUNDLED)])
def test_a_draft_model_is_counted(hub: FakeHub, model: str) -> None:
    """The draft model alone is too large, and then neither is fetched."""
    draft = with_config(hub, **HUGE)
    mesh = room().mesh
    with pytest.raises(MemoryLimitError, match="its weights and those of the draft model"):
        open_llm(model, draft, mesh, "auto", "auto", lambda *_: None)
    assert set(hub.fetched("GET", "HEAD")) == {"config.json"}
    alone, with_draft = (Room(mesh, "float32", "auto", each) for each in (None, described(NAME)[1]))
    assert lacking(draft, with_draft) > lacking(draft, alone)


def test_a_quantized_folder_is_counted_as_it_is(hub: FakeHub, tmp_path: Path) -> None:
    """Beside a draft model of the hub; asking for another form is refused as on loading."""
    assert convert([str(BUNDLED), str(tmp_path / "int8"), "--weights", "int8"]) == 0
    with pytest.raises(ModelError, match="has int8 weights, which stay what they are"):
        open_llm(tmp_path / "int8", NAME, room().mesh, "auto", "int4", lambda *_: None)
    assert set(hub.fetched("GET", "HEAD")) == {"config.json"}


def test_the_bar_counts_bytes(hub: FakeHub) -> None:
    seen: list[tuple[int, int, str]] = []
    model_of_llm(NAME, room(), lambda *told: seen.append(told))
    assert seen[-1][0] == seen[-1][1] > 800_000
    assert {what for _, _, what in seen} >= {"model.safetensors", "tokenizer.model"}
