"""The documents that are written by programs are those that the programs write."""

import importlib.util
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve.config.option import flag_of, options_of
from jaxserve.server.disaggregation.flags import RoleOptions
from jaxserve.server.disaggregation.policy import Decision
from tests.jaxserve.engine.test_families_on_meshes import FAMILIES, MESHES
from tests.jaxserve.engine.test_feature_pairs import FEATURES
from tests.outcome_tables import FAMILIES_ON_MESHES, FEATURE_PAIRS, read
from tests.public_names.environment import variables

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    """Return a program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["api", "configuration"])
def test_a_document_is_what_its_program_writes(name: str) -> None:
    written = (ROOT / "docs" / f"{name}.md").read_text()
    assert written == script(f"make_{name}").document(), f"run python docs/make_{name}.py"


def test_configuration_md_has_every_environment_variable() -> None:
    assert set(script("make_configuration").VARIABLES) == set(variables())


@pytest.mark.parametrize("name", ["speed", "overload"])
def test_a_chart_is_of_the_results(name: str) -> None:
    drawn = (ROOT / "docs" / f"{name}.svg").read_text()
    assert drawn == script("make_figures").DRAWN[name](), f"run python docs/make_figures.py {name}"


def test_disaggregation_md_has_every_flag_and_decision() -> None:
    flags = {flag_of(option.name) for option in options_of(RoleOptions)}
    text = (ROOT / "docs" / "disaggregation.md").read_text()
    assert set(re.findall(r"^\| `(--[\w-]+)", text, re.M)) == flags
    assert set(re.findall(r"^\| `(remote|local_\w+)` ", text, re.M)) == set(Decision)


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    protos = [
        str(path.relative_to(ROOT)) for path in sorted((ROOT / "jaxserve").rglob("v1/*.proto"))
    ]
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outs, *protos], cwd=ROOT, check=True
    )
    generated = list((ROOT / "jaxserve").rglob("v1/*_pb2*"))
    assert generated
    for path in generated:
        made = tmp_path / path.relative_to(ROOT)
        assert path.read_text() == made.read_text(), f"{path.name}: run make protos"


def test_support_md_has_every_family_and_mesh() -> None:
    """`make support-matrix` writes it."""
    wanted = {
        (family, "x".join(map(str, mesh))): "tested" for family in FAMILIES for mesh in MESHES
    }
    assert read(ROOT / "docs" / "support.md", FAMILIES_ON_MESHES) == wanted


def test_features_md_has_every_pair() -> None:
    """`make feature-pairs` writes it."""
    wanted = {**dict.fromkeys(combinations(FEATURES, 2), "tested"), **FEATURE_PAIRS.refused}
    assert read(ROOT / "docs" / "features.md", FEATURE_PAIRS) == wanted
