"""Bundles: steps of an engine that were compiled ahead, and a manifest of them.

    bundle/manifest.json    what the steps were compiled from and for, and the hash of every entry
    bundle/cache/           the entries of jax's persistent compilation cache, under its keys

An entry is code that runs on the device, as trusted as this program: the hashes show that it is
whole, not who made it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.errors import ConfigError
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.bundle_folder import CACHE, FORMAT, MANIFEST, read_manifest, refusal
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.platform import environment
from jaxserve.sharding.mesh import AXES, MeshSpec, device_kind, platform


@dataclass(frozen=True)
class Manifest:
    """Contents of a bundle, and what its steps were compiled from and for."""

    model: str
    spec: str  # hash of the architecture as the devices hold it
    dtype: str
    topology: str
    device_kind: str
    mesh: Mapping[str, int]
    engine: Mapping[str, Any]  # EngineConfig, field by field
    steps: Sequence[str]  # the bucket plan
    environment: Mapping[str, Any]  # versions and flags that a key of jax's cache depends on
    entries: Mapping[str, str]  # sha256 by file
    format: int = FORMAT
    weights: str = "auto"  # as --weights names them

    @property
    def axes(self) -> MeshSpec:
        return MeshSpec(**self.mesh)

    def options(self) -> EngineOptions:
        """Return options that resolve to the engine of the bundle, whatever memory there is."""
        given = {
            field.name: self.engine[field.name]
            for field in fields(EngineOptions)
            if field.name in self.engine
        }
        # The configuration says 0 where nothing is drafted, which no option may ask for.
        given["draft_tokens"] = self.engine["draft_tokens"] or None
        pages = max(pool["pages"] for pool in self.engine["pools"] if "interval" not in pool)
        return EngineOptions(**given, cache_tokens=pages * self.engine["page_size"])


def spec_hash(spec: ModelSpec) -> str:
    """Return the hash of an architecture."""
    return sha256(repr(spec).encode()).hexdigest()


def engine_fields(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of a configuration as JSON has them."""
    return json.loads(json.dumps(asdict(config)))


def write_manifest(d: Deployment, folder: Path) -> None:
    """Write the manifest of what was compiled into the folder's cache."""
    manifest = Manifest(
        model=d.target.model,
        spec=spec_hash(d.spec),
        dtype=str(d.dtype),
        weights=str(d.scheme or "auto"),
        topology=d.topology.name,
        device_kind=device_kind(d.mesh),
        mesh=asdict(d.axes),
        engine=engine_fields(d.config),
        steps=[str(bucket) for bucket in d.buckets],
        environment=environment(platform(d.mesh)),
        entries=hashes(folder / CACHE),
    )
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of all files in a folder, by name."""
    return {path.name: _hash(path) for path in sorted(folder.iterdir())}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def open_bundle(folder: Path) -> Manifest:
    """Return the manifest of a bundle.

    Raises ConfigError if the bundle is not whole, or was compiled by another installation.
    """
    manifest = _read(folder)
    mine = environment("tpu" if manifest.device_kind.startswith("TPU") else "cpu")
    for name, theirs in manifest.environment.items():
        if mine.get(name) != theirs:
            raise refusal(
                folder,
                f"it was compiled with {name} {theirs}, and here is {mine.get(name)} (make it "
                f"again with jaxserve plan --out)",
            )
    _check_entries(folder, manifest)
    return manifest


def _read(folder: Path) -> Manifest:
    try:
        return _checked(Manifest(**read_manifest(folder)))
    except TypeError as error:
        raise refusal(folder, f"its {MANIFEST} is not one: {error}") from None


def _checked(manifest: Manifest) -> Manifest:
    """Return the manifest; TypeError if a field is not what it should be."""
    for name, kind in get_type_hints(Manifest).items():
        kind = {Mapping: dict, Sequence: list}.get(get_origin(kind), kind)
        if not isinstance(getattr(manifest, name), kind):
            raise TypeError(f"{name} is {getattr(manifest, name)!r}")
    known = {"mesh": set(AXES), "engine": {field.name for field in fields(EngineConfig)}}
    for name, names in known.items():
        if getattr(manifest, name).keys() != names:
            raise TypeError(f"{name} has other fields than {', '.join(sorted(names))}")
    for name, kind in get_type_hints(EngineConfig).items():
        if kind in (int, bool, str) and type(manifest.engine[name]) is not kind:
            raise TypeError(f"engine: {name} is {manifest.engine[name]!r}")
    pools = manifest.engine["pools"]
    are_pools = isinstance(pools, list) and all(isinstance(pool, dict) for pool in pools)
    if not (are_pools and pools):
        raise TypeError(f"engine: pools are {pools!r}")
    for number in [*manifest.mesh.values(), *(pool.get("pages") for pool in pools)]:
        if type(number) is not int or number < 1:
            raise TypeError(f"{number!r} is no size of a mesh or a pool")
    return manifest


def _check_entries(folder: Path, manifest: Manifest) -> None:
    try:
        found = hashes(folder / CACHE)
    except OSError as error:
        raise refusal(folder, f"its {CACHE} cannot be read: {error.strerror}") from None
    entries = manifest.entries
    in_both = found.keys() & entries.keys()
    problems = {
        "is missing": entries.keys() - found.keys(),
        "is not in the manifest": found.keys() - entries.keys(),
        "has another hash": {name for name in in_both if found[name] != entries[name]},
    }
    for problem, names in problems.items():
        if names:
            entry = f"its entry {min(names)} {problem}, one of {len(names)}"
            raise refusal(folder, f"{entry} (copy it again)")


def check_engine(
    manifest: Manifest,
    spec: ModelSpec,
    dtype: str,
    kind: str,
    config: EngineConfig,
    weights: str = "auto",
) -> None:
    """Raise ConfigError unless the engine is the one that the steps were compiled for.

    `spec` is as the devices hold it, and `kind` is the kind of the devices.
    """
    facts = [
        ("weights in", manifest.dtype, dtype),
        ("--weights", manifest.weights, weights),
        ("a model with the hash", manifest.spec, spec_hash(spec)),
        ("devices of kind", manifest.device_kind, kind),
    ]
    for what, theirs, mine in facts:
        if theirs != mine:
            raise ConfigError(f"--bundle is for {what} {theirs}; here it is {mine}")
    engine = engine_fields(config)
    for name, value in manifest.engine.items():
        if engine.get(name) != value:
            raise ConfigError(f"--bundle is for {name} {value}; the engine has {engine.get(name)}")
