"""Who may import whom: the arrows of the architecture, read from the syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folders that are imported as parts of jaxserve, by a link there.
LINKED = ("sharding", "pallas_kernels", "checkpoints")
PACKAGES = ("jaxserve", *LINKED, "training", "tests", "benchmarks")
SCRIPTS = ("examples", "docs", "deploy")

# Plain data that both halves of the engine see.
ENGINE_DATA = (
    "jaxserve.engine.plan",
    "jaxserve.engine.row_fields",
    "jaxserve.engine.events",
    "jaxserve.engine.request_limits",
    "jaxserve.engine.kv_segment",
    "jaxserve.engine.buckets",
    "jaxserve.config",
    "jaxserve.request",
    "jaxserve.sampling_params",
    "jaxserve.errors",
    "jaxserve.engine.empty_step",
)
ON_DEVICES = (
    "jaxserve.models",
    "jaxserve.cpu_kernels",
    "sharding",
    "pallas_kernels",
)  # what imports jax below the engine

# Folder or module -> project modules that it may import; the longest prefix of a file's module name
# decides. Modules of LINKED are named without the jaxserve before them.
ALLOWED: dict[str, tuple[str, ...]] = {
    "sharding": ("sharding",),
    "pallas_kernels": ("pallas_kernels", "jaxserve.cpu_kernels"),
    "checkpoints": ("checkpoints", "sharding"),
    "training": ("training", "jaxserve.tokenizer"),
    # The entry point of the command hands over to jaxserve, which knows the models.
    "checkpoints.convert": ("jaxserve.convert", "jaxserve.sigint"),
    "jaxserve.errors": (),  # whoever may import it may import jaxserve.flag_errors
    "jaxserve.flag_errors": ("jaxserve.errors",),
    "jaxserve.config": ("jaxserve.config", "jaxserve.errors"),
    "jaxserve.backends": ("jaxserve.errors",),
    "jaxserve.host_memory": (),
    "jaxserve.interrupts": ("jaxserve.sigint",),
    "jaxserve.sigint": (),
    "jaxserve.sandbox_process": ("jaxserve.interrupts",),
    "jaxserve.names_elsewhere": (),
    "jaxserve.request": (
        "jaxserve.errors",
        "jaxserve.request_values",
        "jaxserve.sampling_params",
        "jaxserve.structure",
    ),
    "jaxserve.sampling_params": (
        "jaxserve.config",
        "jaxserve.errors",
        "jaxserve.names_elsewhere",
        "jaxserve.request_values",
        "jaxserve.structure",
    ),
    "jaxserve.request_values": ("jaxserve.errors",),
    "jaxserve.structure": (
        "jaxserve.structure",
        "jaxserve.config",
        "jaxserve.errors",
        "jaxserve.sandbox_process",
        "jaxserve.tokenizer",
    ),
    "jaxserve.structure.schemas": ("jaxserve.structure.schemas",),
    "jaxserve.structure.lark": ("jaxserve.structure.lark", "jaxserve.structure.schemas.patterns"),
    "jaxserve.structure.worker": (),
    "jaxserve.tokenizer": ("jaxserve.tokenizer",),
    "jaxserve.cpu_kernels": ("jaxserve.cpu_kernels", "jaxserve.errors"),
    "jaxserve.models": (
        "jaxserve.models",
        "jaxserve.cpu_kernels",
        "jaxserve.errors",
        "sharding",
        "pallas_kernels",
    ),
    # The engine's floors, from the ground up: plain data, the two halves, the loop, its builder.
    "jaxserve.engine.plan": ("jaxserve.engine.events", "jaxserve.engine.row_fields"),
    "jaxserve.engine.row_fields": ("jaxserve.request", "jaxserve.sampling_params"),
    "jaxserve.engine.events": (),
    "jaxserve.engine.request_limits": ("jaxserve.config", "jaxserve.request", "jaxserve.errors"),
    "jaxserve.engine.kv_segment": ("jaxserve.errors",),
    "jaxserve.engine.empty_step": ("jaxserve.engine.buckets", "jaxserve.engine.plan"),
    "jaxserve.engine.buckets": ("jaxserve.engine.plan", "jaxserve.config", "jaxserve.errors"),
    "jaxserve.engine.host": (*ENGINE_DATA, "jaxserve.engine.host", "jaxserve.structure.matcher"),
    "jaxserve.engine.device": (
        *ENGINE_DATA,
        "jaxserve.engine.device",
        "jaxserve.host_memory",
        *ON_DEVICES,
    ),
    "jaxserve.engine.engine": (*ENGINE_DATA, "jaxserve.engine.host"),
    "jaxserve.engine.step_costs": (
        *ENGINE_DATA,
        "jaxserve.engine.host",
        "jaxserve.engine.engine",
    ),
    "jaxserve.engine.trace": (*ENGINE_DATA, "jaxserve.engine.host", "jaxserve.engine.engine"),
    "jaxserve.engine.build": (*ENGINE_DATA, "jaxserve.engine", *ON_DEVICES),
    "jaxserve.cluster": (
        "jaxserve.addresses",
        "checkpoints.hub",
        "checkpoints.identity",
        "jaxserve.cluster",
        "jaxserve.cpu_kernels",
        "jaxserve.engine",
        "jaxserve.loading.digests",
        "jaxserve.models.spec",
        "jaxserve.config",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.spec": ("checkpoints", "jaxserve.models", "jaxserve.errors"),
    "jaxserve.loading.tensor_names": ("jaxserve.models",),
    "jaxserve.loading.match": (
        "jaxserve.loading.tensor_names",
        "jaxserve.models",
        "jaxserve.errors",
    ),
    "jaxserve.loading.digests": ("jaxserve.models",),
    "jaxserve.loading.orbax_layout": (
        "checkpoints.orbax_store",
        "jaxserve.loading.match",
        "jaxserve.loading.spec",
        "jaxserve.models",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.load_plan": (
        "checkpoints.orbax_store",
        "jaxserve.cpu_kernels",
        "jaxserve.loading.match",
        "jaxserve.loading.orbax_layout",
        "jaxserve.loading.spec",
        "jaxserve.models",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.tensor_reader": ("checkpoints.safetensors_reader", "jaxserve.models"),
    "jaxserve.loading.parameters": (
        "jaxserve.loading.digests",
        "jaxserve.loading.load_plan",
        "jaxserve.loading.tensor_reader",
        "jaxserve.models",
        "sharding",
    ),
    "jaxserve.loading.folder": (
        "checkpoints.errors",
        "checkpoints.hf",
        "checkpoints.orbax_store",
        "jaxserve.errors",
        "jaxserve.loading.digests",
        "jaxserve.loading.load_plan",
        "jaxserve.loading.match",
        "jaxserve.loading.parameters",
        "jaxserve.cpu_kernels",
        "jaxserve.loading.product",
        "jaxserve.loading.product_rows",
        "jaxserve.loading.spec",
        "jaxserve.loading.token_ids",
        "jaxserve.models",
        "jaxserve.tokenizer",
        "sharding",
    ),
    "jaxserve.loading.product": (
        "jaxserve.cpu_kernels",
        "jaxserve.models",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.product_rows": (
        "jaxserve.cache_folders",
        "jaxserve.compilation_cache",
        "jaxserve.cpu_kernels",
        "jaxserve.loading.load_plan",
        "jaxserve.models",
    ),
    "jaxserve.loading.token_ids": (
        "jaxserve.loading.spec",
        "jaxserve.models",
        "jaxserve.tokenizer",
        "jaxserve.errors",
        "jaxserve.request",
    ),
    "jaxserve.loading.export": (
        "checkpoints",
        "jaxserve.loading.orbax_layout",
        "jaxserve.loading.spec",
        "jaxserve.loading.tensor_names",
        "jaxserve.models",
        "jaxserve.errors",
        "sharding",
    ),
    "jaxserve.loading.convert": (
        "jaxserve.interrupts",
        "checkpoints",
        "jaxserve.loading.export",
        "jaxserve.loading.load_plan",
        "jaxserve.loading.match",
        "jaxserve.loading.model_folder",
        "jaxserve.loading.parameters",
        "jaxserve.loading.spec",
        "jaxserve.errors",
        "jaxserve.progress",
        "sharding",
    ),
    "jaxserve.loading.model_folder": (
        "checkpoints",
        "jaxserve.loading.spec",
        "jaxserve.models.families.weight_table",
        "jaxserve.models.spec",
    ),
    "jaxserve.loading.sampling_defaults": ("jaxserve.errors", "jaxserve.sampling_params"),
    "jaxserve.loading.draft": (
        "jaxserve.config",
        "jaxserve.errors",
        "jaxserve.loading.folder",
        "jaxserve.loading.spec",
        "jaxserve.tokenizer",
    ),
    "jaxserve.chat": (
        "jaxserve.chat",
        "jaxserve.completion",
        "jaxserve.config",
        "jaxserve.errors",
        "jaxserve.request",
        "jaxserve.request_values",
        "jaxserve.sandbox_process",
        "jaxserve.structure",
        "jaxserve.tokenizer",
    ),
    "jaxserve.chat.worker": (),
    "jaxserve.cli": (
        "checkpoints.errors",
        "checkpoints.hf",
        "checkpoints.hub",
        "jaxserve.cache_folders",
        "jaxserve.cli",
        "jaxserve.cluster.hosts",
        "jaxserve.sigint",
        "jaxserve.chat",
        "jaxserve.completion",
        "jaxserve.config",
        "jaxserve.errors",
        "jaxserve.models.precision",
        "jaxserve.sampling_params",
        "jaxserve.structure",
        "jaxserve.tokenizer",
        "pallas_kernels.errors",
        "sharding.errors",
    ),
    "jaxserve.completion_html": ("jaxserve.engine.events", "jaxserve.tokenizer"),
    "jaxserve.completion": (
        "jaxserve.completion_html",
        "jaxserve.engine",
        "jaxserve.names_elsewhere",
        "jaxserve.request",
        "jaxserve.tokenizer",
    ),
    "jaxserve.llm": ("jaxserve", "checkpoints.hub.names", "sharding"),
    "jaxserve.loaded_llm": ("jaxserve", "checkpoints.hub.names", "sharding"),
    "jaxserve.async_llm": ("jaxserve", "sharding.mesh"),
    "jaxserve.llm_warm_up": ("jaxserve", "sharding.mesh"),
    "jaxserve.llm_folder": ("jaxserve", "checkpoints.hub.names", "sharding.mesh"),
    "jaxserve.llm_arguments": ("jaxserve", "sharding.mesh"),
    "jaxserve.generate": (
        "jaxserve",
        "checkpoints.errors",
        "checkpoints.hub.names",
        "sharding.mesh",
        "sharding.params",
    ),
    "jaxserve.addresses": ("jaxserve.errors",),
    "jaxserve.cache_folders": ("jaxserve.errors",),
    "jaxserve.convert": ("jaxserve", "checkpoints"),
    "jaxserve.doctor": ("jaxserve", "pallas_kernels.errors", "sharding.mesh"),
    "jaxserve.plan": (
        "jaxserve",
        "sharding",
        "checkpoints.errors",
        "checkpoints.hf",
        "checkpoints.hub",
        "checkpoints.safetensors_reader",
        "pallas_kernels",
    ),
    "jaxserve.ray": ("jaxserve", "checkpoints.hub.names"),
    "jaxserve.ray.tied_process": (),
    "jaxserve.bench": ("jaxserve", "checkpoints.hub.names", "sharding"),
    "jaxserve.tls_files": ("jaxserve.errors",),
    "jaxserve.v1": ("jaxserve.v1",),
    "jaxserve.client": (
        "jaxserve.addresses",
        "jaxserve.tls_files",
        "jaxserve.client",
        "jaxserve.sigint",
        "jaxserve.cli",
        "jaxserve.config.option",
        "jaxserve.errors",
        "jaxserve.request_values",
        "jaxserve.sampling_params",
        "jaxserve.structure",
        "jaxserve.v1",
    ),
    # A part of the program, which imports chat in any case; the clients are not to wait for that.
    "jaxserve.client.flags": (
        "jaxserve.addresses",
        "jaxserve.chat",
        "jaxserve.client",
        "jaxserve.cli",
        "jaxserve.config.option",
        "jaxserve.errors",
        "jaxserve.sampling_params",
    ),
    "jaxserve.server": ("jaxserve", "checkpoints.hub.names", "sharding.mesh"),
    "jaxserve.serve": ("jaxserve",),
    "jaxserve": ("jaxserve",),
}
# Modules without jax, beside all of engine/host.
WITHOUT_JAX = (
    "jaxserve",
    "jaxserve.chat",
    "jaxserve.chat.conversation",
    "jaxserve.client",
    "jaxserve.completion",
    "jaxserve.config",
    "jaxserve.errors",
    "jaxserve.prompts",
    "jaxserve.request",
    "jaxserve.sampling_params",
    "jaxserve.structure.grammars",
    "jaxserve.tokenizer",
    "jaxserve.engine.buckets",
    "jaxserve.engine.engine",
    "jaxserve.engine.events",
    "jaxserve.engine.kv_segment",
    "jaxserve.engine.plan",
    "jaxserve.engine.request_limits",
    "jaxserve.engine.row_fields",
    "jaxserve.engine.trace",
    "jaxserve.server.core.service",
    "jaxserve.server.grpc.inference",
)
FOR_THEMSELVES = ("jaxserve.bench", "jaxserve.ray")  # imported by nobody else
UNSAFE_CALLS = ("eval", "exec")
UNSAFE_MODULES = ("pickle", "marshal", "shelve", "jax.experimental.serialize_executable")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for package in ("jaxserve", "sharding", "pallas_kernels", "checkpoints", "training")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imported_names(node: ast.AST) -> list[str]:
    """Names that an import statement binds, with their modules; none of another statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide what is imported"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def called(node: ast.AST) -> str:
    """Name of the function that is called; "" for one with a dot, and for anything else."""
    is_named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id if is_named else ""


def names_in_calls(node: ast.AST) -> list[str]:
    """Names of modules in calls of `files` and `import_module`."""
    if called(node) in ("files", "import_module"):
        return [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
    return []


def project_imports(tree: ast.AST) -> Iterator[str]:
    """Names of the project that the code imports, as its folders call them."""
    for node in ast.walk(tree):
        names = [name for name in imported_names(node) if name.split(".")[0] in PACKAGES]
        for name in names:
            parent, *parts = name.split(".")
            in_linked_folder = parent == "jaxserve" and parts and parts[0] in LINKED
            yield ".".join(parts) if in_linked_folder else name


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True
    )


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def forbidden_imports(module: str) -> Iterator[str]:
    """Project modules that a module imports and must not."""
    rule = max((prefix for prefix in ALLOWED if is_under(module, prefix)), key=len)
    others = ALLOWED[rule]
    if "jaxserve.errors" in others:
        others = (*others, "jaxserve.flag_errors")
    for name in project_imports(ast.parse(SOURCES[module].read_text())):
        apart = any(is_under(name, one) and not is_under(module, one) for one in FOR_THEMSELVES)
        if apart or not any(is_under(name, allowed) for allowed in others):
            yield name


def test_modules_import_only_what_the_import_law_allows() -> None:
    found = [f"{m} must not import {name}" for m in SOURCES for name in forbidden_imports(m)]
    assert not found, "\n".join(found)


@cache
def names_everywhere() -> dict[Path, set[str]]:
    """Return the names that each file of packages and scripts imports, also by calls."""
    paths = [path for top in (*PACKAGES, *SCRIPTS) for path in (ROOT / top).rglob("*.py")]
    trees = {path: ast.walk(ast.parse(path.read_text())) for path in paths}
    return {
        path: {name for node in nodes for name in (*imported_names(node), *names_in_calls(node))}
        for path, nodes in trees.items()
    }


@pytest.mark.parametrize("folder", LINKED)
def test_folders_beside_jaxserve_are_imported_as_its_parts(folder: str) -> None:
    """Under its own name a folder would be imported a second time, with classes of its own."""
    assert (ROOT / "jaxserve" / folder).is_symlink()
    assert (ROOT / "jaxserve" / folder).samefile(ROOT / folder)
    for path, names in names_everywhere().items():
        found = [name for name in names if is_under(name, folder)]
        assert not found, f"{path} imports {found}"


def unsafe_code(source: str) -> Iterator[str]:
    """Statements that evaluate text, or import a module that makes objects from bytes."""
    for node in ast.walk(ast.parse(source)):
        call = called(node) in UNSAFE_CALLS
        names = imported_names(node)
        if call or any(is_under(name, unsafe) for name in names for unsafe in UNSAFE_MODULES):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "import pickle",
        "from marshal import loads",
        "from jax.experimental import serialize_executable",
        "from jax.experimental.serialize_executable import deserialize_and_load",
    ],
)
def test_unsafe_code_is_recognized(source: str) -> None:
    assert list(unsafe_code(source)) == [source]


def test_no_code_from_data() -> None:
    """No module unpickles, or evaluates text."""
    found = {module: list(unsafe_code(path.read_text())) for module, path in SOURCES.items()}
    assert not any(found.values()), {module: code for module, code in found.items() if code}


def test_the_host_half_imports_where_there_is_no_jax() -> None:
    """A process in which jax cannot be imported at all."""
    host = [module for module in SOURCES if is_under(module, "jaxserve.engine.host")]
    assert len(host) > 8, "the folder has moved"
    modules = [*WITHOUT_JAX, *host]
    blocked = "import sys; sys.modules.update(jax=None, jaxlib=None)"
    done = run_python(f"{blocked}; import {', '.join(modules)}")
    assert done.returncode == 0, done.stderr
    assert run_python(f"{blocked}; import jax").returncode != 0, "jax was not blocked"


def test_the_load_generator_never_imports_jax() -> None:
    """It would only take memory from the server beside it."""
    script = (
        "import sys, jaxserve.bench.__main__, jaxserve.bench.serve; sys.exit('jax' in sys.modules)"
    )
    done = run_python(script)
    assert done.returncode == 0, done.stderr


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
    script = f"import sys, jaxserve.generate.program; print(*{packages} & sys.modules.keys())"
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split()


MAY_READ_JAX_CONFIG_AND_ENVIRONMENT = {
    "jaxserve.backends",
    "jaxserve.loading.convert",
    "jaxserve.server.observe.log",  # of gRPC's core
    "jaxserve.server.observe.traces",  # reads the variables of OpenTelemetry's exporters
    "jaxserve.cache_folders",
    "jaxserve.compilation_cache",
    "jaxserve.cluster.bootstrap",
    "jaxserve.cluster.hosts",
    "jaxserve.doctor.devices",
    "jaxserve.doctor.machine",
    "jaxserve.engine.device.compiler_options",  # XLA_FLAGS, which come first
    "jaxserve.engine.device.lowering",  # precision of products
    "jaxserve.plan.platform",
    "jaxserve.ray.host_process",  # whose variables are those of a program that it starts
}


SETTINGS = ("jax.config", "os.environ", "os.getenv")


def settings_used(source: str) -> Iterator[str]:
    """Places in code, not in comments or docstrings, that name jax's config or the environment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in SETTINGS:
            yield ast.unparse(node)
        yield from (name for name in imported_names(node) if name in SETTINGS)


def test_only_listed_modules_use_jax_config_and_the_environment() -> None:
    found = {module for module, path in SOURCES.items() if any(settings_used(path.read_text()))}
    assert found == MAY_READ_JAX_CONFIG_AND_ENVIRONMENT
