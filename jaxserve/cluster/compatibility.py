"""Facts: named values that must be equal on all hosts of a pod, or on two servers.

jax does not notice a host that computes something else: the pod would hang, or answer nonsense.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from importlib.metadata import version

import jax

from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.config.option import flag_of
from jaxserve.cpu_kernels.library import instructions_here
from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.plan import Admission, LanePlan, StepPlan
from jaxserve.engine.row_fields import ROW_FIELDS
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.mesh import MeshSpec

Facts = dict[str, str]  # values by name, in the order in which differences are reported
# Given a host and its facts, returns in what it differs from the leader; None if in nothing.
Judge = Callable[[int, Facts], str | None]
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
    if device.platform == "cpu":
        devices |= {"instructions of the kernels for a CPU": instructions_here() or "none"}
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
    return digest(repr((columns, row)))


def facts_of_engine(model: Facts, config: EngineConfig) -> Facts:
    """Return facts before anything is compiled: the model, and every size that was decided.

    `model` is the result of `facts_of_model`.
    """
    sizes = {
        f"the engine's {field.name}": str(getattr(config, field.name)) for field in fields(config)
    }
    return model | sizes | facts_of_steps(BucketPlan.of(config).buckets)


def facts_of_model(spec: ModelSpec, dtype: str, weights: str) -> Facts:
    """Return facts of a model, apart from the numbers of its weights.

    Args:
        spec: Spec of the checkpoint, for facts that are equal on every mesh; or the one that the
            devices hold.
        weights: Form that the weights are held in, whether --weights or the checkpoint said so.
    """
    return {"the model": digest(repr(spec)), "its dtype": dtype, "the form of its weights": weights}


def facts_of_steps(buckets: Iterable[Bucket]) -> Facts:
    """Return the compiled steps by their shapes."""
    return {"the compiled steps": ", ".join(map(str, buckets))}


def compiled_stage(bucket: Bucket) -> str:
    """Return the stage at which a host states that it has compiled a step beside the launches.

    Its facts are none, or what has kept it from that.
    """
    return f"compiled {bucket}"


def digest(text: str) -> str:
    """Return 16 hex digits that stand for a text."""
    return sha256(text.encode()).hexdigest()[:16]


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first fact that differs, with both values; None when all are equal."""
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            return f"{name}: {theirs.get(name, 'none')} there, {mine.get(name, 'none')} here"
    return None
