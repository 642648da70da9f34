"""Facts: named values that must be equal on all hosts of a pod, or on two servers.

jax does not notice a host that computes something else: the pod would hang, or answer nonsense.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.config.option import flag_of
from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.plan import Admission, LanePlan, StepPlan
from jaxserve.engine.row_fields import ROW_FIELDS
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.mesh import MeshSpec

Facts = dict[str, str]  # values by name, in the order in which differences are reported
PACKAGES = ("jaxserve", "jax", "jaxlib")


def facts_of_start(mesh: MeshSpec, dtype: str, weights: str, options: EngineOptions) -> Facts:
    """Return facts before anything is loaded: releases, devices and flags that shape the steps."""
    device = jax.local_devices()[0]
    packages = {f"the version of {package}": version(package) for package in PACKAGES}
    # Builds of one version may differ, too.
    packages |= {"the format of step plans": plan_format()}
    devices = {
        "platform": device.platform,
        "device kind": device.device_kind,
        "devices per host": str(jax.local_device_count()),
    }
    flags = {f"--{name}": str(size) for name, size in asdict(mesh).items()}
    flags |= {"--dtype": dtype, "--weights": weights}
    flags |= {flag_of(field.name): str(getattr(options, field.name)) for field in fields(options)}
    return packages | devices | flags


def plan_format() -> str:
    """Return a digest of a plan's fields and their types, those of packed rows included.

    Decoding fills a missing column with its default and ignores an unknown one, so hosts must have
    the same format.
    """
    columns = [
        (kind.__name__, [(field.name, str(field.type)) for field in fields(kind)])
        for kind in (StepPlan, LanePlan, Admission)
    ]
    row = [(name, field.dtype.__name__, field.shape) for name, field in ROW_FIELDS.items()]
    return _digest(repr((columns, row)))


def facts_of_engine(spec: ModelSpec, params: dict, weights: str, config: EngineConfig) -> Facts:
    """Return facts before anything is compiled: the model, and every size that was decided.

    `weights` is the form that the weights are held in, whether --weights asked for it or the
    checkpoint has it.
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
    """Return facts of a model that are the same on every mesh.

    `spec` has to be the checkpoint's, not one adapted to a mesh by ModelSpec.on.
    """
    return {
        "the model": _digest(repr(spec)),
        "the model's weights": norm_digest(params),
        "their form": weights,
    }


def facts_of_weights(params: dict) -> Facts:
    """Return a digest of the first number of every weight, the same on every mesh.

    It tells models apart that share their norms, such as one with a merged LoRA. Compiles a
    program.
    """
    found = sha256()
    for (path, _), number in zip(
        jax.tree_util.tree_leaves_with_path(params), _first_numbers(params), strict=True
    ):
        found.update(jax.tree_util.keystr(path).encode() + number.tobytes())
    return {"the first number of every weight": found.hexdigest()[:16]}


def _first_numbers(params: dict) -> np.ndarray:
    """Return the first number of each leaf, float32 [leaves]."""
    leaves = jax.tree.leaves(params)
    # Whatever the sharding, the first device of the mesh holds a leaf's first number, so the
    # program needs no communication.
    device = leaves[0].sharding.mesh.devices.flat[0]
    parts = [
        next(shard.data for shard in leaf.addressable_shards if shard.device == device)
        for leaf in leaves
    ]

    def first(parts: list[jax.Array]) -> jax.Array:
        return jnp.stack([part[(0,) * part.ndim].astype(jnp.float32) for part in parts])

    return np.asarray(jax.jit(first)(parts))


def facts_of_steps(buckets: Iterable[Bucket]) -> Facts:
    """Return the compiled steps by their shapes."""
    return {"the compiled steps": ", ".join(map(str, buckets))}


def norm_digest(params: dict) -> str:
    """Return a digest of the norms' weights, which every device of any mesh holds whole."""
    found = sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if name.endswith("norm']") and leaf.ndim == 1:
            found.update(name.encode() + np.asarray(leaf.addressable_data(0)).tobytes())
    return found.hexdigest()[:16]


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first fact that differs, with both values; None when all are equal."""
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            return f"{name}: {theirs.get(name, 'none')} there, {mine.get(name, 'none')} here"
    return None
