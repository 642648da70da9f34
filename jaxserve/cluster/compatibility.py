"""What the hosts of a pod must have in common: jax does not notice one that computes something
else.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.models.spec import ModelSpec
from sharding.mesh import MeshSpec

Facts = dict[str, str]
PACKAGES = ("jaxserve", "jax", "jaxlib")


def facts_of_start(mesh: MeshSpec, dtype: str, weights: str, options: EngineOptions) -> Facts:
    """Before anything is loaded: releases, devices, and the flags that decide what is compiled."""
    device = jax.local_devices()[0]
    packages = {f"the version of {package}": version(package) for package in PACKAGES}
    devices = {
        "platform": device.platform,
        "device kind": device.device_kind,
        "devices per host": str(jax.local_device_count()),
    }
    flags = {f"--{name}": str(size) for name, size in asdict(mesh).items()} | {"--dtype": dtype}
    flags |= {"--weights": weights}
    flags |= {
        f"--{field.name.replace('_', '-')}": str(getattr(options, field.name))
        for field in fields(options)
    }
    return packages | devices | flags


def facts_of_engine(spec: ModelSpec, params: dict, weights: str, config: EngineConfig) -> Facts:
    """Before anything is compiled: the model, as far as every host holds it, and every size that
    was decided.

    weights: the form that they are held in, whether --weights asked for it or the folder has it.
    """
    sizes = {
        f"the engine's {field.name}": str(getattr(config, field.name)) for field in fields(config)
    }
    return (
        facts_of_model(spec, params, weights)
        | sizes
        | facts_of_steps(BucketPlan.of(config).buckets)
    )


def facts_of_model(spec: ModelSpec, params: dict, weights: str) -> Facts:
    """The same on every mesh, where spec is the checkpoint's and not that of a mesh
    (ModelSpec.on)."""
    return {
        "the model": _digest(repr(spec)),
        "the model's weights": digest_of(params),
        "their form": weights,
    }


def facts_of_weights(params: dict) -> Facts:
    """More of the weights than the norms': the first number of each, for those that share norms (a
    merged LoRA).

    The same on every mesh of this process. It compiles a program.
    """
    found = sha256()
    for (path, _), number in zip(
        jax.tree_util.tree_leaves_with_path(params), _first_numbers(params), strict=True
    ):
        found.update(jax.tree_util.keystr(path).encode() + number.tobytes())
    return {"the first number of every weight": found.hexdigest()[:16]}


def _first_numbers(params: dict) -> np.ndarray:
    """float32, of each leaf in order: the first device of its mesh has it."""
    leaves = jax.tree.leaves(params)
    device = leaves[0].sharding.mesh.devices.flat[0]
    parts = [
        next(shard.data for shard in leaf.addressable_shards if shard.device == device)
        for leaf in leaves
    ]

    def first(parts: list[jax.Array]) -> jax.Array:
        return jnp.stack([part[(0,) * part.ndim].astype(jnp.float32) for part in parts])

    return np.asarray(jax.jit(first)(parts))


def facts_of_steps(buckets: Iterable[Bucket]) -> Facts:
    """What was compiled."""
    return {"the compiled steps": ", ".join(map(str, buckets))}


def digest_of(params: dict) -> str:
    """Of the norms' weights: every device of any mesh holds them whole, on every host."""
    found = sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if name.endswith("norm']") and leaf.ndim == 1:
            found.update(name.encode() + np.asarray(leaf.addressable_data(0)).tobytes())
    return found.hexdigest()[:16]


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first fact that differs, with both values; None when all are the same."""
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            return f"{name}: {theirs.get(name, 'none')} there, {mine.get(name, 'none')} here"
    return None
