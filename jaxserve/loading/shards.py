"""One parameter from the tensors that it holds: each shard read straight to the device that it
belongs to.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, SingleDeviceSharding

from checkpoints.safetensors_reader import check_finite
from jaxserve.errors import ModelError
from jaxserve.models.families.weight_table import Stored, Tensor
from jaxserve.models.quant import Quantized, Ranges, Rounding
from jaxserve.models.spec import ModelSpec
from sharding.params import ParamSpec

Read = Callable[[Ranges], np.ndarray]


def load_parameter(
    name: str,
    rows: list[Tensor],
    param: ParamSpec | Quantized,
    tensors: Mapping[str, Stored],
    specs: tuple[ModelSpec, ModelSpec],
    mesh: Mesh,
) -> jax.Array | Quantized:
    """A parameter from the tensors that it holds, each shard read from the memory map straight to
    where it belongs.

    A quantized one is rounded on the way, unless its rows are of stored numbers and scales. specs:
    of the checkpoint, and of what these devices hold.
    """

    def part(param: ParamSpec, rows: list[Tensor]) -> Read:
        held = sum(row.size(param.axes, row.sizes(specs[1])) for row in rows)
        if held != math.prod(param.shape):
            raise ModelError(
                f"the weight-name table has {held} of the {math.prod(param.shape)} numbers of "
                f"{rows[0].path}"
            )
        return partial(_read_rows, rows, param, tensors, specs)

    if isinstance(param, ParamSpec):
        return _sharded(param, mesh, part(param, _floats(rows, tensors)))
    scales = [row for row in rows if row.scales]
    if scales:
        numbers = [row for row in rows if not row.scales]
        read_values, read_scales = part(param.values, numbers), part(param.scales, scales)
    else:
        wide = replace(param.values, dtype=jnp.dtype(jnp.float32))
        rounding = Rounding(name, param, part(wide, _floats(rows, tensors)))
        read_values, read_scales = rounding.values, rounding.scales
    placed = _sharded(
        param.scales, mesh, read_scales
    )  # first: groups that shards would cut are refused there
    return replace(param, values=_sharded(param.values, mesh, read_values), scales=placed)


def _floats(rows: list[Tensor], tensors: Mapping[str, Stored]) -> list[Tensor]:
    """The rows; ModelError for one that is stored as something else."""
    for row in rows:
        if not is_float(tensors[row.name].dtype):
            raise ModelError(
                f"tensor {row.name} is stored as {tensors[row.name].dtype}; floating point is "
                f"needed"
            )
    return rows


def _read_rows(
    rows: list[Tensor],
    param: ParamSpec,
    tensors: Mapping[str, Stored],
    specs: tuple[ModelSpec, ModelSpec],
    asked: Ranges,
) -> np.ndarray:
    """Of a parameter the entries `asked` along each of its axes."""
    found = np.empty([len(part) for part in asked], param.dtype)
    for row in rows:
        _read_into(found, asked, row, tensors[row.name], param.axes, specs)
    return found


def _sharded(param: ParamSpec, mesh: Mesh, read: Read) -> jax.Array:
    """The parameter, of which the host has one shard at a time; devices that hold the same one have
    it read once.
    """
    form = param.format(mesh)
    holders: dict[Ranges, list[Any]] = {}
    indices = param.sharding(mesh).addressable_devices_indices_map(param.shape)
    for device, index in indices.items():
        asked = tuple(
            range(size)[part] for size, part in zip(param.shape, index or (), strict=True)
        )
        holders.setdefault(asked, []).append(device)
    shards: dict[Any, jax.Array] = {}
    for asked, devices in holders.items():
        places = [Format(form.layout, SingleDeviceSharding(device)) for device in devices]
        copies = jax.block_until_ready(jax.device_put([read(asked)] * len(devices), places))
        shards |= zip(devices, copies, strict=True)
    return jax.make_array_from_single_device_arrays(
        param.shape, param.sharding(mesh), [shards[device] for device in indices]
    )


def _read_into(
    whole: np.ndarray,
    asked: Sequence[range],
    row: Tensor,
    stored: Stored,
    axes: str,
    specs: tuple[ModelSpec, ModelSpec],
) -> None:
    """A row's share of one shard of its parameter: of the entries `asked` along each of the
    parameter's axes.
    """
    spec, held = specs
    places = row.places(row.sizes(held))
    wanted, within = "", dict[str, slice]()
    source, target = (
        list[slice](),
        list[slice | int](),
    )  # what is wanted of what is read, and where it goes
    for letter, part in zip(axes, asked, strict=True):
        if letter not in places:
            wanted += letter
            within[letter] = slice(part.start, part.stop)
            source.append(slice(None))
            target.append(slice(None))
        else:
            letters, at = places[letter]
            begin, end = max(at.start, part.start), min(at.stop, part.stop)
            if begin >= end:
                return
            wanted += letters
            source += [slice(begin - at.start, end - at.start)] if letters else []
            target.append(
                slice(begin - part.start, end - part.start) if letters else begin - part.start
            )
    copies = held.num_kv_heads // spec.num_kv_heads
    values = _read(row, stored, row.sizes(spec), wanted, within, copies)
    if jnp.issubdtype(values.dtype, jnp.floating):
        check_finite(row.name, values)
    _copy(values[tuple(source)], whole[tuple(target)])


def _read(
    row: Tensor,
    stored: Stored,
    sizes: Mapping[str, int],
    wanted: str,
    within: dict[str, slice],
    copies: int,
) -> np.ndarray:
    """Tensor.read, the kv heads copied so many times; `within` counts the copies."""
    if copies == 1 or "K" not in wanted:
        return row.read(stored, sizes, wanted, within)
    heads = within["K"]
    first = heads.start // copies
    within["K"] = slice(first, -(-heads.stop // copies))
    spread = _spread(row.read(stored, sizes, wanted, within), wanted, copies)
    asked = slice(heads.start - first * copies, heads.stop - first * copies)
    return spread[tuple(asked if letter == "K" else slice(None) for letter in wanted)]


def _spread(view: np.ndarray, axes: str, copies: int) -> np.ndarray:
    """Every kv head so many times, its queries (G, which follows K) shared out among them."""
    at = axes.index("K")
    if "G" not in axes:
        return view.repeat(copies, axis=at)
    heads, queries = view.shape[at : at + 2]
    return view.reshape(*view.shape[:at], heads * copies, queries // copies, *view.shape[at + 2 :])


def _copy(view: np.ndarray, target: np.ndarray) -> None:
    """In tiles where the view turns a matrix over: numpy alone takes three times as long there."""
    near = (
        int(np.argmin(view.strides)) if view.ndim else 0
    )  # the dimension that is contiguous in the file
    if near >= view.ndim - 1:
        target[...] = view
        return
    tile = [1] * view.ndim
    tile[near], tile[-1] = 128, 32
    for corner in product(
        *(range(0, size, step) for size, step in zip(view.shape, tile, strict=True))
    ):
        at = tuple(slice(start, start + step) for start, step in zip(corner, tile, strict=True))
        target[at] = view[at]


def is_float(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2
