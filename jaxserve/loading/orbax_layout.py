"""Layout of a converted folder: parameters by path, quantized ones as values and scales."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoints.orbax_store import CONVERT_AGAIN, MANIFEST
from jaxserve.errors import ModelError
from jaxserve.loading.match import first_names
from jaxserve.loading.spec import ModelCheckpoint
from jaxserve.models.declarations import Declaration, declarations
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import ParamPath, Tensor
from jaxserve.models.fused import PARTS
from jaxserve.models.quant import QuantScheme, contracted
from jaxserve.models.spec import ModelSpec
from jaxserve.models.summed_last import SummedLast
from jaxserve.sharding.params import ParamSpec

VALUES = "values"  # last part of the names of a quantized parameter's two arrays
SCALES = "scales"


def match_parameters(source: ModelCheckpoint, held: ModelSpec) -> list[Tensor]:
    """Return the weight table of a converted folder.

    ModelError when a parameter is left over, missing, or not stored in the manifest's scheme.

    Parameters are stored as one device holds them. Where `held`, the architecture on the mesh, has
    copies of kv heads, a fused parameter is read in parts, because its parts are not all copied
    alike.
    """
    folder = source.checkpoint.folder
    # The table has no dtypes, so that any will do here.
    declared = declarations(param_specs(held, jnp.dtype(jnp.float32), source.scheme))
    table = [row for path, leaf in declared for row in _rows(path, leaf)]
    only_in_one = sorted({row.name for row in table} ^ source.stored.keys())
    if only_in_one:
        config = "config.json"
        if source.scheme:
            config = f"config.json, with the {source.scheme} weights of {MANIFEST},"
        raise ModelError(
            f"{folder}: {config} does not fit the stored parameters: "
            f"{first_names(only_in_one)} are only in one"
        )
    if source.scheme:
        _check_scheme(source, source.scheme, table)
    return table if held.kv_copies == 1 else [part for row in table for part in _parts(row)]


def parameter_name(path: ParamPath) -> str:
    """Return the stored name of a parameter: ("layers", 0, "qkv") -> "layers.0.qkv"."""
    return ".".join(map(str, path))


def _rows(path: ParamPath, param: Declaration) -> Iterator[Tensor]:
    """Yield a parameter's table row; a quantized one has a row for values and one for scales."""
    assert not isinstance(param, SummedLast), "folders have parameters as declared for XLA"
    name = parameter_name(path)
    if isinstance(param, ParamSpec):
        yield Tensor(name, path, param.axes)
    else:
        at = contracted(str(path[-1]), param.values.axes).start
        scales = param.scales.axes[at], param.scales.shape[at]
        yield Tensor(f"{name}.{VALUES}", path, param.values.axes)
        yield Tensor(f"{name}.{SCALES}", path, param.scales.axes, scales=scales)


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


def _check_scheme(source: ModelCheckpoint, scheme: QuantScheme, table: Sequence[Tensor]) -> None:
    """Raise ModelError unless values and scales have the dtype and shape of the scheme."""
    dtypes = {VALUES: scheme.dtype, SCALES: np.dtype(np.float32)}
    for row in table:
        part = row.name.rpartition(".")[2]
        if part not in dtypes:
            continue
        stored = source.stored[row.name]
        shape = row.shape(row.sizes(source.spec))
        if stored.dtype != dtypes[part] or list(stored.shape) != shape:
            raise ModelError(
                f"{source.checkpoint.folder / MANIFEST}: says {scheme} weights, but {row.name} is "
                f"{stored.dtype} {list(stored.shape)}, not {dtypes[part]} {shape}; {CONVERT_AGAIN}"
            )
