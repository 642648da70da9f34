"""Who may import whom: the arrows of the architecture, read from the syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "jaxserve",
    "sharding",
    "pallas_kernels",
    "checkpoints",
    "training",
    "tests",
    "benchmarks",
)

# Folder or module -> project modules that it may import; the longest prefix of a file's module name
# decides.
ALLOWED: dict[str, tuple[str, ...]] = {
    "sharding": ("sharding",),
    "pallas_kernels": ("pallas_kernels",),
    "checkpoints": ("checkpoints", "sharding"),
    "training": ("training",),
    "checkpoints.convert": (
        "checkpoints",
        "sharding",
        "jaxserve.cli.exits",
        "jaxserve.errors",
        "jaxserve.loading.export",
        "jaxserve.loading.checkpoint",
    ),
    "jaxserve.errors": (),
    "jaxserve.config": ("jaxserve.config", "jaxserve.errors"),
    "jaxserve.sandbox_process": (),
    "jaxserve.request": ("jaxserve.errors", "jaxserve.structure"),
    "jaxserve.structure": (
        "jaxserve.structure",
        "jaxserve.errors",
        "jaxserve.sandbox_process",
        "jaxserve.tokenizer",
    ),
    "jaxserve.structure.worker": (),
    "jaxserve.tokenizer": ("jaxserve.tokenizer",),
    "jaxserve.models": ("jaxserve.models", "jaxserve.errors", "sharding", "pallas_kernels"),
    "jaxserve.engine": (
        "jaxserve.engine",
        "jaxserve.models",
        "jaxserve.config",
        "jaxserve.request",
        "jaxserve.structure.matcher",
        "jaxserve.errors",
        "sharding",
        "pallas_kernels",
    ),
    "jaxserve.cluster": (
        "jaxserve.cluster",
        "jaxserve.engine",
        "jaxserve.models.spec",
        "jaxserve.config",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.shards": (
        "checkpoints.safetensors_reader",
        "jaxserve.models",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.orbax_layout": (
        "checkpoints.orbax_store",
        "jaxserve.models",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.checkpoint": (
        "checkpoints",
        "jaxserve.loading.orbax_layout",
        "jaxserve.models",
        "jaxserve.loading.shards",
        "jaxserve.tokenizer",
        "jaxserve.errors",
        "jaxserve.request",
        "sharding",
    ),
    "jaxserve.loading.export": (
        "checkpoints",
        "jaxserve.loading.orbax_layout",
        "jaxserve.loading.checkpoint",
        "jaxserve.models",
        "jaxserve.errors",
    ),
    "jaxserve.chat": (
        "jaxserve.chat",
        "jaxserve.completion",
        "jaxserve.errors",
        "jaxserve.sandbox_process",
        "jaxserve.structure",
        "jaxserve.tokenizer",
    ),
    "jaxserve.chat.worker": (),
    "jaxserve.cli": (
        "jaxserve.cli",
        "jaxserve.chat.conversation",
        "jaxserve.completion",
        "jaxserve.config",
        "jaxserve.errors",
        "jaxserve.request",
        "jaxserve.structure",
        "jaxserve.tokenizer",
    ),
    "jaxserve.completion": ("jaxserve.engine", "jaxserve.request", "jaxserve.tokenizer"),
    "jaxserve.llm": ("jaxserve", "sharding"),
    "jaxserve.generate": ("jaxserve", "sharding", "checkpoints.errors", "pallas_kernels.dispatch"),
    "jaxserve.plan": (
        "jaxserve",
        "sharding",
        "checkpoints.errors",
        "checkpoints.safetensors_reader",
        "pallas_kernels",
    ),
    "jaxserve.bench": ("jaxserve", "sharding", "checkpoints.errors", "pallas_kernels.dispatch"),
    "jaxserve.v1": ("jaxserve.v1",),
    "jaxserve.client": (
        "jaxserve.client",
        "jaxserve.cli",
        "jaxserve.errors",
        "jaxserve.request",
        "jaxserve.structure",
        "jaxserve.v1",
    ),
    "jaxserve.server": ("jaxserve", "sharding.mesh"),
    "jaxserve.serve": ("jaxserve", "sharding", "checkpoints.errors", "pallas_kernels.dispatch"),
    "jaxserve": ("jaxserve",),
}
HOST_HALF = (
    "jaxserve",
    "jaxserve.chat",
    "jaxserve.chat.conversation",
    "jaxserve.client",
    "jaxserve.config",
    "jaxserve.errors",
    "jaxserve.prompts",
    "jaxserve.request",
    "jaxserve.structure.grammars",
    "jaxserve.tokenizer",
    "jaxserve.engine.buckets",
    "jaxserve.engine.engine",
    "jaxserve.engine.host.lane",
    "jaxserve.engine.host.page_pool",
    "jaxserve.engine.kv_segment",
    "jaxserve.engine.plan",
    "jaxserve.engine.host.prefix_cache",
    "jaxserve.engine.host.scheduler",
    "jaxserve.engine.host.sequence",
    "jaxserve.engine.host.kv_transfer",
    "jaxserve.server.core.service",
    "jaxserve.server.grpc.inference",
)
BENCH = "jaxserve.bench"  # imported by nobody else
UNSAFE_CALLS = ("eval", "exec", "pickle.load", "pickle.loads", "serialize_executable")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for package in ("jaxserve", "sharding", "pallas_kernels", "checkpoints", "training")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def project_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrows"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("module", SOURCES)
def test_arrows(module: str) -> None:
    rule = max((prefix for prefix in ALLOWED if is_under(module, prefix)), key=len)
    for name in project_imports(ast.parse(SOURCES[module].read_text())):
        assert is_under(module, BENCH) or not is_under(name, BENCH), (
            f"{module} must not import {name}"
        )
        assert any(is_under(name, allowed) for allowed in ALLOWED[rule]), (
            f"{module} must not import {name}"
        )


def test_the_converter_imports_the_loader_late() -> None:
    """It alone of its package knows families, and only once it runs."""
    script = "import sys, checkpoints.convert; sys.exit('jaxserve' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("module", SOURCES)
def test_no_code_from_data(module: str) -> None:
    """No pickle, no eval, no exec."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in UNSAFE_CALLS, f"{module}:{node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "pickle" not in ast.unparse(node), f"{module}:{node.lineno}"


def test_the_host_half_never_imports_jax() -> None:
    script = f"import sys, {', '.join(HOST_HALF)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_the_load_generator_never_imports_jax() -> None:
    """It would only take memory from the server beside it."""
    script = (
        "import sys, jaxserve.bench.__main__, jaxserve.bench.serve; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_the_engine_needs_nothing_of_the_server() -> None:
    """It runs where these are not installed."""
    packages = {
        "starlette",
        "uvicorn",
        "uvloop",
        "pydantic",
        "prometheus_client",
        "grpc",
        "google.protobuf",
    }
    script = f"import sys, jaxserve.llm, jaxserve.generate; print(*{packages} & sys.modules.keys())"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert not found.stdout.split()


SETTERS = {
    "checkpoints.convert",
    "jaxserve.server.observe.traces",  # reads the variables of OpenTelemetry's exporters
    "jaxserve.cli.compilation_cache",
    "jaxserve.cluster.bootstrap",
    "jaxserve.plan.platform",
}


def test_only_entry_points_touch_jax_config_and_the_environment() -> None:
    for module, path in SOURCES.items():
        source = path.read_text()
        if module not in SETTERS:
            assert (
                "jax.config" not in source.replace("no jax.config", "")
                and "os.environ" not in source
            ), module
