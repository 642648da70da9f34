"""Layout of a converted folder: parameters by path, and the quantization scheme of weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.tree_util import SequenceKey, tree_leaves_with_path

from jaxserve.checkpoints.orbax_store import (
    AS_STORED,
    CONVERT_AGAIN,
    MANIFEST,
    OrbaxCheckpoint,
    is_orbax,
    read_manifest,
)
from jaxserve.errors import ModelError, flag_text
from jaxserve.loading.match import first_names
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import Tensor
from jaxserve.models.fused import PARTS
from jaxserve.models.quant import Quantized, contracted, is_quantized, parse_scheme
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.params import ParamSpec, is_param_spec


def stored_weights(folder: Path) -> str:
    """Return the scheme of a folder's weights as --weights names it; auto for full precision.

    CheckpointError where the folder was converted and has no manifest.
    """
    return read_manifest(folder).weights if is_orbax(folder) else AS_STORED


def choose_weights(folder: Path, asked: str, stored: str) -> str:
    """Return the scheme to load: `asked` of a folder in full precision, else the stored one.

    ModelError when the stored scheme is unknown, or when --weights asks for another one: quantized
    weights are not quantized again.
    """
    if stored == AS_STORED:
        return asked
    try:
        parse_scheme(stored)
    except ModelError:
        raise ModelError(
            f"{folder / MANIFEST}: weights in {stored!r} are not known here; {CONVERT_AGAIN}"
        ) from None
    if asked not in (AS_STORED, stored):
        raise ModelError(
            flag_text(
                "--weights",
                asked,
                f"{folder} has {stored} weights, which stay what they are (leave it out, or "
                f"convert their source)",
            )
        )
    return stored


def match_parameters(
    spec: ModelSpec, spread: ModelSpec, checkpoint: OrbaxCheckpoint
) -> list[Tensor]:
    """Return the weight table of a converted folder.

    ModelError when a parameter is left over, missing, or not stored in the manifest's scheme.

    Parameters are stored as one device holds them. `spread` is the spec on this mesh: where it has
    copies of kv heads, a fused parameter is read in parts, because its parts are not all copied
    alike.
    """
    found = checkpoint.tensors
    scheme = parse_scheme(checkpoint.weights)
    declared = param_specs(spec, jnp.dtype(jnp.float32), scheme)
    leaves = tree_leaves_with_path(
        declared, is_leaf=lambda leaf: is_quantized(leaf) or is_param_spec(leaf)
    )
    table = [row for keys, param in leaves for row in _rows(_path(keys), param)]
    only_in_one = sorted({row.name for row in table} ^ found.keys())
    if only_in_one:
        config = "config.json"
        if scheme:
            config = f"config.json, with the {scheme} weights of {MANIFEST},"
        raise ModelError(
            f"{checkpoint.folder}: {config} does not fit the stored parameters: "
            f"{first_names(only_in_one)} are only in one"
        )
    for keys, param in leaves:
        if isinstance(param, Quantized):
            _check_scheme(checkpoint, parameter_name(_path(keys)), param)
    return table if spread == spec else [part for row in table for part in _parts(row)]


def _path(keys: Sequence[Any]) -> tuple[str | int, ...]:
    return tuple(key.idx if isinstance(key, SequenceKey) else key.key for key in keys)


def parameter_name(path: Sequence[str | int]) -> str:
    """Return the stored name of a parameter: ("layers", 0, "qkv") -> "layers.0.qkv"."""
    return ".".join(map(str, path))


def _rows(path: tuple[str | int, ...], param: ParamSpec | Quantized) -> Iterator[Tensor]:
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
