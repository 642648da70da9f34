"""What a folder of checkpoints.convert holds of a model: its parameters by path, and in which form
its weights are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.tree_util import SequenceKey, tree_leaves_with_path

from checkpoints.orbax_store import (
    AGAIN,
    AS_THEY_ARE,
    MANIFEST,
    OrbaxCheckpoint,
    is_orbax,
    read_manifest,
)
from jaxserve.errors import ModelError
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import Tensor
from jaxserve.models.fused import PARTS
from jaxserve.models.quant import Quantized, contracted, form_of, is_quantized
from jaxserve.models.spec import ModelSpec
from sharding.params import ParamSpec, is_param_spec


def stored_weights(folder: Path) -> str:
    """The form that its weights are in, as --weights names it: auto where that is full precision.

    CheckpointError where the folder was converted and has no manifest.
    """
    return read_manifest(folder).weights if is_orbax(folder) else AS_THEY_ARE


def chosen_weights(folder: Path, asked: str, stored: str) -> str:
    """--weights, where auto is what is stored. ModelError for another form than that, or one that
    is not known.
    """
    if stored == AS_THEY_ARE:
        return asked
    try:
        form_of(stored)
    except ModelError:
        raise ModelError(
            f"{folder / MANIFEST}: weights in {stored!r} are not known here; {AGAIN}"
        ) from None
    if asked not in (AS_THEY_ARE, stored):
        raise ModelError(
            f"--weights {asked}: {folder} has {stored} weights, which stay what they are (leave "
            f"it out, or convert "
            "their source)"
        )
    return stored


def match_parameters(
    spec: ModelSpec, spread: ModelSpec, checkpoint: OrbaxCheckpoint
) -> list[Tensor]:
    """The weight-name table; ModelError when a parameter is left over or missing, or not in the
    form that it should be.

    Parameters are stored as one device holds them; fused ones are read in parts where kv heads are
    to be copied, since what is copied is not the same in all of them.
    """
    found, folder, form = checkpoint.tensors, checkpoint.folder, form_of(checkpoint.weights)
    declared = param_specs(spec, jnp.dtype(jnp.float32), form)
    leaves = tree_leaves_with_path(
        declared, is_leaf=lambda leaf: is_quantized(leaf) or is_param_spec(leaf)
    )
    table = [row for keys, param in leaves for row in _rows(tuple(map(_step, keys)), param)]
    if only := sorted({row.name for row in table} ^ found.keys()):
        said = f"config.json, with the {form} weights of {MANIFEST}," if form else "config.json"
        raise ModelError(
            f"{folder}: {said} does not fit the stored parameters: {some(only)} are only in one"
        )
    for keys, param in leaves:
        if isinstance(param, Quantized):
            _check_form(checkpoint, parameter_name(tuple(map(_step, keys))), param)
    return table if spread == spec else [part for row in table for part in _parts(row)]


def _step(key: Any) -> str | int:
    return key.idx if isinstance(key, SequenceKey) else key.key


def parameter_name(path: Sequence[str | int]) -> str:
    """("layers", 0, "qkv") -> "layers.0.qkv"."""
    return ".".join(map(str, path))


def _rows(path: tuple[str | int, ...], param: ParamSpec | Quantized) -> Iterator[Tensor]:
    """Of a quantized parameter two: its numbers, and its scales."""
    name = parameter_name(path)
    if isinstance(param, ParamSpec):
        yield Tensor(name, path, param.axes)
        return
    at = contracted(str(path[-1]), param.values.axes).start
    scales = param.scales.axes[at], param.scales.shape[at]
    yield Tensor(f"{name}.values", path, param.values.axes)
    yield Tensor(f"{name}.scales", path, param.scales.axes, scales=scales)


def _parts(row: Tensor) -> list[Tensor]:
    """Of a fused parameter with kv heads."""
    names = [name for name, part in PARTS.items() if part.fused == row.path[-1]]
    if "K" not in row.axes or not names:
        return [row]
    fused = "|".join(PARTS[name].letters.strip("()") for name in names)
    axes = row.axes.replace(PARTS[names[0]].axis, f"([{fused}])")
    return [
        replace(row, path=(*row.path[:-1], name), axes=axes, part=i) for i, name in enumerate(names)
    ]


def _check_form(checkpoint: OrbaxCheckpoint, name: str, param: Quantized) -> None:
    """ModelError unless numbers and scales are such as the form in the manifest makes them."""
    for part, wanted in (("values", param.values), ("scales", param.scales)):
        stored = checkpoint.tensors[f"{name}.{part}"]
        if (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
            raise ModelError(
                f"{checkpoint.folder / MANIFEST}: says {param.form} weights, but {name}.{part} "
                f"is {stored.dtype} "
                f"{list(stored.shape)}, not {wanted.dtype} {list(wanted.shape)}; {AGAIN}"
            )


def some(names: Sequence[str]) -> str:
    """For a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
