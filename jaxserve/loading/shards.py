"""Loads one parameter from its tensors: each shard is read straight to the device that holds it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.checkpoints.safetensors_reader import check_finite
from jaxserve.errors import ModelError
from jaxserve.loading.digests import ParameterDigests
from jaxserve.models.families.weight_table import Stored, Tensor
from jaxserve.models.quant import Quantized
from jaxserve.models.quantize import Ranges, ShardQuantizer
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.params import ParamSpec

Read = Callable[[Ranges], np.ndarray]  # reads the given range of each of a parameter's dimensions
# Entries of a tile of `_copy`: along the dimension that is contiguous in the file, and along the
# one that is contiguous in the target.
FILE_TILE = 128
TARGET_TILE = 32


def load_parameter(
    name: str,
    rows: list[Tensor],
    param: ParamSpec | Quantized,
    tensors: Mapping[str, Stored],
    specs: tuple[ModelSpec, ModelSpec],
    mesh: Mesh,
    digests: ParameterDigests | None = None,
) -> jax.Array | Quantized:
    """Load one parameter, reading each shard from the memory map straight to its devices.

    rows: the table rows of the tensors that the parameter consists of. A quantized parameter is
    rounded on the way, unless its rows are stored values and scales. specs: the checkpoint's spec,
    and the spec that these devices hold, which may have copies of kv heads. digests: get every
    shard that is read.
    """

    def reader(param: ParamSpec, rows: list[Tensor]) -> Read:
        held = sum(row.size(param.axes, row.sizes(specs[1])) for row in rows)
        if held != math.prod(param.shape):
            raise ModelError(
                f"the weight-name table has {held} of the {math.prod(param.shape)} numbers of "
                f"{rows[0].path}"
            )
        return partial(_read_rows, rows, param, tensors, specs)

    if isinstance(param, ParamSpec):
        return _sharded(param, mesh, reader(param, _float_rows(rows, tensors)), digests)
    scale_rows = [row for row in rows if row.scales]
    if scale_rows:
        value_rows = [row for row in rows if not row.scales]
        read_values = reader(param.values, value_rows)
        read_scales = reader(param.scales, scale_rows)
    else:
        wide = replace(param.values, dtype=jnp.dtype(jnp.float32))
        quantizer = ShardQuantizer(name, param, reader(wide, _float_rows(rows, tensors)))
        read_values = quantizer.values
        read_scales = quantizer.scales
    # Scales come first: groups that a shard's edge would cut are refused here, before the values
    # are read.
    scales = _sharded(param.scales, mesh, read_scales, digests, "scales")
    values = _sharded(param.values, mesh, read_values, digests)
    return replace(param, values=values, scales=scales)


def _float_rows(rows: list[Tensor], tensors: Mapping[str, Stored]) -> list[Tensor]:
    """Return the rows; ModelError for a tensor that is not stored as floating point."""
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
    """Read the entries `asked` along each of the parameter's axes."""
    found = np.empty([len(part) for part in asked], param.dtype)
    for row in rows:
        _read_into(found, asked, row, tensors[row.name], param.axes, specs)
    return found


def _sharded(
    param: ParamSpec,
    mesh: Mesh,
    read: Read,
    digests: ParameterDigests | None,
    kind: str = "values",
) -> jax.Array:
    """Build the parameter's array with one shard at a time in host memory.

    A shard that several devices hold is read once. kind: see ParameterDigests.add.
    """
    form = param.format(mesh)
    holders: dict[Ranges, list[Any]] = {}
    indices = param.sharding(mesh).devices_indices_map(param.shape)
    for device, index in indices.items():
        asked = tuple(
            range(size)[part] for size, part in zip(param.shape, index or (), strict=True)
        )
        holders.setdefault(asked, []).append(device)
    here = param.sharding(mesh).addressable_devices
    shards: dict[Any, jax.Array] = {}
    for asked, holding in holders.items():
        devices = [device for device in holding if device in here]
        if not devices and not (digests and digests.all_hosts):
            continue
        shard = read(asked)
        if digests:
            hosts = {device.process_index for device in holding}
            digests.add(param.axes, asked, shard, hosts, kind)
        formats = [Format(form.layout, SingleDeviceSharding(device)) for device in devices]
        # Waiting for the transfer lets the host's copy go before the next shard is read.
        copies = jax.block_until_ready(jax.device_put([shard] * len(devices), formats))
        shards |= zip(devices, copies, strict=True)
    return jax.make_array_from_single_device_arrays(
        param.shape, param.sharding(mesh), [shards[device] for device in indices if device in here]
    )


class _Overlap(NamedTuple):
    """The entries that one tensor contributes to one shard of its parameter."""

    wanted: str  # letters to read, in the parameter's order
    within: dict[str, slice]  # letter -> entries to read, for letters that are not fused
    source: tuple[slice, ...]  # what is used of the dimensions that are read
    target: tuple[slice | int, ...]  # where it goes in the shard


def _overlap(row: Tensor, held: ModelSpec, axes: str, asked: Sequence[range]) -> _Overlap | None:
    """Intersect a tensor's part of its parameter with the entries `asked`; None if disjoint."""
    fused = row.fused_slices(row.sizes(held))
    wanted = ""
    within = dict[str, slice]()
    source = list[slice]()
    target = list[slice | int]()
    for letter, part in zip(axes, asked, strict=True):
        if letter not in fused:
            wanted += letter
            within[letter] = slice(part.start, part.stop)
            source.append(slice(None))
            target.append(slice(None))
            continue
        letters, at = fused[letter]
        begin = max(at.start, part.start)
        end = min(at.stop, part.stop)
        if begin >= end:
            return None
        if letters:
            wanted += letters
            source.append(slice(begin - at.start, end - at.start))
            target.append(slice(begin - part.start, end - part.start))
        else:  # the tensor is a single entry along this axis and lacks the dimension
            target.append(begin - part.start)
    return _Overlap(wanted, within, tuple(source), tuple(target))


def _read_into(
    whole: np.ndarray,
    asked: Sequence[range],
    row: Tensor,
    stored: Stored,
    axes: str,
    specs: tuple[ModelSpec, ModelSpec],
) -> None:
    """Read a tensor's share of one shard into `whole`, which holds the entries `asked`."""
    spec, held = specs
    overlap = _overlap(row, held, axes, asked)
    if overlap is None:
        return
    copies = held.num_kv_heads // spec.num_kv_heads
    values = _read(row, stored, row.sizes(spec), overlap.wanted, overlap.within, copies)
    if jnp.issubdtype(values.dtype, jnp.floating):
        check_finite(row.name, values)
    _copy(values[overlap.source], whole[overlap.target])


def _read(
    row: Tensor,
    stored: Stored,
    sizes: Mapping[str, int],
    wanted: str,
    within: dict[str, slice],
    copies: int,
) -> np.ndarray:
    """Read a tensor as Tensor.read does, with every kv head copied `copies` times.

    `within` counts kv heads with their copies; it is changed to count those of the checkpoint.
    """
    if copies == 1 or "K" not in wanted:
        return row.read(stored, sizes, wanted, within)
    heads = within["K"]
    first = heads.start // copies
    within["K"] = slice(first, -(-heads.stop // copies))
    spread = _copy_heads(row.read(stored, sizes, wanted, within), wanted, copies)
    asked = slice(heads.start - first * copies, heads.stop - first * copies)
    return spread[tuple(asked if letter == "K" else slice(None) for letter in wanted)]


def _copy_heads(view: np.ndarray, axes: str, copies: int) -> np.ndarray:
    """Repeat every kv head; its queries (G, which follows K) are divided among the copies."""
    at = axes.index("K")
    if "G" not in axes:
        return view.repeat(copies, axis=at)
    heads, queries = view.shape[at : at + 2]
    return view.reshape(*view.shape[:at], heads * copies, queries // copies, *view.shape[at + 2 :])


def _copy(view: np.ndarray, target: np.ndarray) -> None:
    """Copy an array, in tiles where the view transposes a matrix.

    NumPy alone takes three times as long there, since it misses the cache in every row.
    """
    contiguous = int(np.argmin(view.strides)) if view.ndim else 0  # dimension, in the file
    if contiguous >= view.ndim - 1:
        target[...] = view
        return
    tile = [1] * view.ndim
    tile[contiguous] = FILE_TILE
    tile[-1] = TARGET_TILE
    starts = [range(0, size, step) for size, step in zip(view.shape, tile, strict=True)]
    for corner in product(*starts):
        at = tuple(slice(start, start + step) for start, step in zip(corner, tile, strict=True))
        target[at] = view[at]


def is_float(dtype: np.dtype) -> bool:
    """Return whether the dtype is floating point of at least 16 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2
