"""What `jaxserve` and `jaxserve.client` export, and what users reach from there."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from typing import Any, get_args, get_type_hints, is_typeddict

from tests.public_names import shown

PACKAGES = ("jaxserve", "jaxserve.client")
# Exported by none of them: what LLM and SamplingParams take, and errors that LLM's docstring names.
BESIDE = (
    "jaxserve.checkpoints.errors.CheckpointError",
    "jaxserve.structure.Structure",
    "jaxserve.tokenizer.TokenizerError",
    "jaxserve.pallas_kernels.errors.KernelError",
    "jaxserve.sharding.mesh.MeshSpec",
    "jaxserve.sharding.rules.ShardingError",
)
NOT_CONSTRUCTED = ("jaxserve.client.AsyncStream", "jaxserve.client.Stream")  # but by clients
PROTOCOLS = "__enter__ __exit__ __iter__ __next__ __aenter__ __aexit__ __aiter__ __anext__".split()
SELF = re.compile(r"self\.([a-z]\w*)")
PARAMETER = inspect.Parameter


def exports() -> dict[str, str]:
    paths = [f"{home}.{name}" for home in PACKAGES for name in import_module(home).__all__]
    found: dict[str, str] = {}
    described_at: dict[int, str] = {}
    for path in (*paths, *BESIDE):
        home, _, name = path.rpartition(".")
        thing = getattr(import_module(home), name)
        first = described_at.setdefault(id(thing), path)
        found |= described(path, thing) if first == path else {path: f"is {first}"}
    return found


def described(path: str, thing: Any) -> dict[str, str]:
    """A class, a function or a type, with what belongs to it."""
    if is_typeddict(thing):
        hints = {key: shown.annotation(hint) for key, hint in get_type_hints(thing).items()}
        return {path: "keywords"} | {f"{path}[{key}]": hint for key, hint in hints.items()}
    if inspect.isclass(thing):
        return of_class(path, thing)
    if inspect.isfunction(thing):
        return {path: _kind(thing)} | _parameters(path, inspect.signature(thing))
    return {path: f"type {shown.annotation(thing)}"}


def of_class(path: str, kind: type) -> dict[str, str]:
    found = {path: _what(kind)} | _members(path, kind)
    if is_dataclass(kind):
        return found | dict(_fields(path, kind, ()))
    if shown.is_ours(kind.__init__) and path not in NOT_CONSTRUCTED:
        found |= _parameters(path, _without_self(kind.__init__))
    return found | {f"{path}.{name}": "attribute" for name in sorted(_attributes(kind))}


def _what(kind: type) -> str:
    if issubclass(kind, Exception):
        return "error, also " + ", ".join(base.__name__ for base in kind.__mro__[1:-2])
    return "dataclass" if is_dataclass(kind) else "class"


def _members(path: str, kind: type) -> dict[str, str]:
    """Methods and properties, inherited ones too, with the methods' parameters."""
    found: dict[str, str] = {}
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not shown.is_ours(function) or not inspect.isfunction(function):
            continue
        if name in PROTOCOLS or not name.startswith("_"):
            found[f"{path}.{name}"] = _kind(member)
        if not (name.startswith("_") or isinstance(member, property)):
            static = isinstance(member, staticmethod)
            signature = inspect.signature(function) if static else _without_self(function)
            found |= _parameters(f"{path}.{name}", signature)
    return found


def _kind(member: Any) -> str:
    if isinstance(member, property):
        return "property"
    if isinstance(member, staticmethod | classmethod):
        return "static method" if isinstance(member, staticmethod) else "class method"
    return "async function" if inspect.iscoroutinefunction(member) else "function"


def _without_self(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _parameters(path: str, signature: inspect.Signature) -> dict[str, str]:
    """An entry for each, so that a new one is new, and no change of the function."""
    found: dict[str, str] = {}
    for place, parameter in enumerate(signature.parameters.values(), 1):
        found[f"{path}({parameter.name})"] = _parameter(place, parameter)
    return found


def _parameter(place: int, parameter: inspect.Parameter) -> str:
    if parameter.kind in (PARAMETER.VAR_POSITIONAL, PARAMETER.VAR_KEYWORD):
        return f"any, {shown.annotation(parameter.annotation)}"
    by = "keyword" if parameter.kind is PARAMETER.KEYWORD_ONLY else f"position {place}"
    if parameter.default is PARAMETER.empty:
        return f"{by}, required"
    return f"{by}, default {shown.value(parameter.default)}"


def _attributes(kind: type) -> Iterator[str]:
    """Names without an underscore that constructors of this project's classes set."""
    for owner in kind.__mro__:
        if shown.is_ours(owner) and "__init__" in vars(owner):
            tree = ast.parse(textwrap.dedent(inspect.getsource(vars(owner)["__init__"])))
            for node in ast.walk(tree):
                stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if stored and (name := SELF.fullmatch(ast.unparse(node))):
                    yield name[1]


def _fields(path: str, kind: type, outer: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    """Fields, and behind a dot those of dataclasses in them that nobody exports."""
    hints, place = get_type_hints(kind), 0
    for field in fields(kind):
        place += not field.kw_only
        if field.name.startswith("_"):
            continue
        by = "keyword" if field.kw_only else f"position {place}"
        yield f"{path}.{field.name}", f"field, {by}, {_default(field)}"
        for inner in _held(hints[field.name]):
            if inner not in (kind, *outer) and not _is_exported(inner):
                yield from _fields(f"{path}.{field.name}", inner, (kind, *outer))


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"default {shown.value(field.default)}"
    if field.default_factory is not MISSING:
        return f"default {shown.value(field.default_factory())}"
    return "required"


def _held(hint: Any) -> Iterator[type]:
    """Dataclasses of this project in a type."""
    if inspect.isclass(hint) and is_dataclass(hint) and shown.is_ours(hint):
        yield hint
    for part in get_args(hint):
        yield from _held(part)


def _is_exported(kind: type) -> bool:
    homes = (*PACKAGES, *(path.rpartition(".")[0] for path in BESIDE))
    return any(getattr(import_module(home), kind.__name__, None) is kind for home in homes)
