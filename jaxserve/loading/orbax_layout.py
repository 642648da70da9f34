"""Layout of a converted folder: parameters by path, quantized ones as values and scales."""

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from jaxserve.checkpoints.orbax_store import (
    CONVERT_AGAIN,
    MANIFEST,
    OrbaxCheckpoint,
)
from jaxserve.errors import ModelError
from jaxserve.loading.match import first_names
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import ParamPath, Tensor
from jaxserve.models.fused import PARTS
from jaxserve.models.quant import Quantized, contracted, declarations, parse_scheme
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.params import ParamSpec


def match_parameters(checkpoint: OrbaxCheckpoint, spec: ModelSpec, held: ModelSpec) -> list[Tensor]:
    """Return the weight table of a converted folder with the architecture `spec`.

    ModelError when a parameter is left over, missing, or not stored in the manifest's scheme.

    Parameters are stored as one device holds them. Where `held`, the architecture on the mesh, has
    copies of kv heads, a fused parameter is read in parts, because its parts are not all copied
    alike.
    """
    found = checkpoint.tensors
    scheme = parse_scheme(checkpoint.weights)
    declared = declarations(param_specs(spec, jnp.dtype(jnp.float32), scheme))
    table = [row for path, param in declared for row in _rows(path, param)]
    only_in_one = sorted({row.name for row in table} ^ found.keys())
    if only_in_one:
        config = "config.json"
        if scheme:
            config = f"config.json, with the {scheme} weights of {MANIFEST},"
        raise ModelError(
            f"{checkpoint.folder}: {config} does not fit the stored parameters: "
            f"{first_names(only_in_one)} are only in one"
        )
    for path, param in declared:
        if isinstance(param, Quantized):
            _check_scheme(checkpoint, parameter_name(path), param)
    return table if held == spec else [part for row in table for part in _parts(row)]


def parameter_name(path: ParamPath) -> str:
    """Return the stored name of a parameter: ("layers", 0, "qkv") -> "layers.0.qkv"."""
    return ".".join(map(str, path))


def _rows(path: ParamPath, param: ParamSpec | Quantized) -> Iterator[Tensor]:
    """Yield a parameter's table row; a quantized one has a row for values and one for scales."""
    name = parameter_name(path)
    if isinstance(param, ParamSpec):
        yield Tensor(name, path, param.axes)
        return
    at = contracted(str(path[-1]), param.values.axes).start
    scales = param.scales.axes[at], param.scales.shape[at]
    yield Tensor(f"{name}.values", path, param.values.axes)
    yield Tensor(f"{name}.scales", path, param.scales.axes, scales=scales)


def _parts(row: Tensor) -> list[Tensor]:
    """Split the row of a fused parameter with kv heads into a row for each of its parts."""
    names = [name for name, part in PARTS.items() if part.fused == row.path[-1]]
    if "K" not in row.axes or not names:
        return [row]
    fused = "|".join(PARTS[name].letters.strip("()") for name in names)
    axes = row.axes.replace(PARTS[names[0]].axis, f"([{fused}])")
    return [
        replace(row, path=(*row.path[:-1], name), axes=axes, part=i) for i, name in enumerate(names)
    ]


def _check_scheme(checkpoint: OrbaxCheckpoint, name: str, param: Quantized) -> None:
    """Raise ModelError unless values and scales have the dtype and shape of the scheme."""
    for part, wanted in (("values", param.values), ("scales", param.scales)):
        stored = checkpoint.tensors[f"{name}.{part}"]
        if (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
            raise ModelError(
                f"{checkpoint.folder / MANIFEST}: says {param.scheme} weights, but {name}.{part} "
                f"is {stored.dtype} {list(stored.shape)}, not {wanted.dtype} "
                f"{list(wanted.shape)}; {CONVERT_AGAIN}"
            )
