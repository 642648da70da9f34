"""Devices that jax sees on a machine, and the kernels that run on them."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.backends import PLATFORMS, why_no_devices
from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import load
from jaxserve.doctor.machine import (
    CUDA_PLUGIN,
    GIB,
    Finding,
    has_tpu,
    installed_version,
    nvidia_driver,
)
from jaxserve.engine.device.kernels.choice import (
    choose_attention,
    choose_grouped_matmul,
    choose_quantized_matmul,
    choose_recurrence,
)
from jaxserve.engine.device.memory import state_sizes
from jaxserve.loading.spec import read_spec
from jaxserve.models.precision import XLA
from jaxserve.models.quant import SCHEMES
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.plan.model_config import read_config
from jaxserve.sharding.mesh import MeshSpec, platform

BFLOAT16 = jnp.dtype(jnp.bfloat16)
INT4 = SCHEMES["int4-g128"]
CACHE_TOKENS = 2**17  # of the engine whose kernels are looked for
REFERENCE = "reference"
WITHOUT = f"correct its driver and plugin, or set {PLATFORMS}=cpu to do without it"


def devices(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield the devices that jax sees, their memory, and the kernels that run on them."""
    try:
        found = jax.devices()
    # AssertionError where a platform of JAX_PLATFORMS has no plugin
    except (RuntimeError, AssertionError, ValueError) as error:
        reason, advice = why_no_devices(error)
        yield Finding("devices", "none", f"jax does not start: {reason}: {advice or WITHOUT}")
        return
    kinds = Counter((device.platform, device.device_kind) for device in found)
    words = [f"{count} x {kind} ({name})" for (name, kind), count in kinds.items()]
    yield Finding("devices", ", ".join(words), unused_accelerator(found[0].platform, root))
    limit = (found[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        yield Finding("device memory", f"{limit / GIB:.1f} GiB of each for programs")
    yield from kernels(found[0])


def unused_accelerator(in_use: str, root: Path) -> str:
    """Return why jax does not use this machine's GPU or TPU; empty if it does, or there is none.

    Args:
        in_use: Platform of the devices that jax sees.
    """
    chosen = os.environ.get("JAX_PLATFORMS")
    for name, is_here, package, extra in (
        ("GPU", nvidia_driver(root) is not None, CUDA_PLUGIN, "cuda13"),
        ("TPU", has_tpu(root), "libtpu", "tpu"),
    ):
        if not is_here or in_use == name.lower():
            continue
        if chosen:
            return f"there is a {name}, and JAX_PLATFORMS={chosen} leaves it out: unset it"
        if installed_version(package) is None:
            return f"there is a {name}, and {package} is missing: pip install 'jaxserve[{extra}]'"
        return f"there is a {name}, and jax cannot use it: JAX_PLATFORMS={name.lower()} says why"
    return ""


def kernels(device: Any) -> Iterator[Finding]:
    """Yield the kernels that steps of published models take on a device."""
    dense = _engine_of("llama3.1-8b", EngineOptions(), device)
    pages = _engine_of("llama3.1-8b", EngineOptions(kv="int8"), device)
    latent = _engine_of("deepseek-v3", EngineOptions(), device)
    mixture = _engine_of("qwen3-30b-a3b", EngineOptions(), device)
    hybrid = _engine_of("qwen3.5-27b", EngineOptions(), device)
    for name, choose in (
        ("attention", partial(choose_attention, *dense)),
        ("attention, int8 pages", partial(choose_attention, *pages)),
        ("latent attention", partial(choose_attention, *latent)),
        ("experts", partial(choose_grouped_matmul, *mixture)),
        ("int4 weights", partial(_int4_kernel, *dense)),
        ("recurrent states", partial(choose_recurrence, *hybrid[:3])),
    ):
        yield Finding(f"kernel of {name}", *_chosen(choose))
    if device.platform == "cpu":
        yield Finding("kernel of products", _cpu_kernel())


def _cpu_kernel() -> str:
    """Return the instructions of the kernel for products of few rows, or why XLA has them."""
    try:
        return load().instructions
    except CpuKernelError as error:
        return f"{XLA}: {error}"


def _chosen(choose: Callable[[], str]) -> tuple[str, str]:
    """Return the kernel that is chosen, with the reason if it is none, and what is wrong."""
    with _refusals() as refused:
        try:
            kernel = choose()
        except KernelError as error:
            return "none", str(error)
    because = f": {refused[0]}" if refused and kernel == REFERENCE else ""
    return kernel + because, ""


def _engine_of(
    model: str, options: EngineOptions, device: Any
) -> tuple[ModelSpec, EngineConfig, Mesh, jnp.dtype]:
    """Return spec, configuration, mesh and dtype of an engine of a published model on a device."""
    _, spec = read_spec(read_config(model)[1])
    config = resolve(
        options,
        max_positions=spec.max_positions,
        lanes=1,
        affordable_tokens=CACHE_TOKENS,
        windows=[group.window for group in spec.page_groups()],
        states=state_sizes(spec),
        weights=BFLOAT16.name,
        context_note=spec.context_note,
    )
    return spec, config, MeshSpec().build([device]), BFLOAT16


def _int4_kernel(spec: ModelSpec, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype) -> str:
    """Return the kernel of products with int4 weights; XLA has those that no kernel takes."""
    found = choose_quantized_matmul(spec, config, mesh, dtype, INT4)
    return platform(mesh) if found else REFERENCE


@contextmanager
def _refusals() -> Iterator[list[str]]:
    """Collect why kernels are passed over, which the engine logs as warnings."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("jaxserve.engine")
    propagates = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield messages
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
