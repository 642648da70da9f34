"""Which quantized matrix product the weights of an engine's steps use."""

import logging
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.models.decoder import param_specs
from jaxserve.models.quant import KernelBinding, Quantized, QuantScheme, contracted, is_quantized
from jaxserve.models.spec import ModelSpec
from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.api import Demand, Options
from sharding.mesh import device_kind, platform

log = logging.getLogger("jaxserve.engine")


def choose_quantized_matmul(
    spec: ModelSpec, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, form: QuantScheme | None
) -> Mapping[str, KernelBinding]:
    """By name, the weights whose products are a kernel's; KernelError when the one that is asked
    for cannot.

    dtype: of activations. config.quantized_matmul: a name, or auto. What auto passes over is
    logged.
    """
    found: dict[str, KernelBinding] = {}
    for name, weight in _in_groups(spec, dtype, form).items():
        demand = _demand(name, weight, mesh, dtype)

        def log_refusal(kernel: str, error: KernelError, name: str = name) -> None:
            log.warning("quantized-matmul %r is passed over for %s: %s", kernel, name, error)

        asked = Options(device_kind(mesh)), demand
        kernel = dispatch.choose_quantized(
            config.quantized_matmul, platform(mesh), asked, log_refusal
        )
        if kernel != "reference":
            found[name] = KernelBinding(
                weight.values.axes, mesh, dispatch.QUANTIZED[kernel], demand
            )
    return found


def _in_groups(spec: ModelSpec, dtype: jnp.dtype, form: QuantScheme | None) -> dict[str, Quantized]:
    """The declarations of weights with groups, but for experts; every layer's are alike."""

    def declared() -> Iterator[tuple[str, Quantized]]:
        specs = param_specs(spec, dtype, form)
        for weights in (specs, *specs["layers"]):
            yield from (
                (name, leaf)
                for name, leaf in weights.items()
                if is_quantized(leaf) and leaf.scheme.group
            )

    return dict(declared())


def _demand(name: str, weight: Quantized, mesh: Mesh, dtype: jnp.dtype) -> Demand:
    values = weight.values
    shape, at = values.sharding(mesh).shard_shape(values.shape), contracted(name, values.axes)
    columns = (*shape[: at.start], *shape[at.stop :])
    assert weight.scheme.group
    turned = at.start > 0
    if turned:
        columns = (math.prod(columns),)  # layers.flatten
    return Demand(math.prod(shape[at]), columns, weight.scheme.group, dtype, turned)
