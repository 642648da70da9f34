"""Loads the parameters of a plan: each shard is read straight to the devices that hold it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.loading.digests import ParameterDigests, WeightDigests
from jaxserve.loading.load_plan import LoadPlan, ParameterPlan
from jaxserve.loading.tensor_reader import TensorReader
from jaxserve.models.declarations import is_declaration
from jaxserve.models.families.weight_table import ParamPath, Tensor
from jaxserve.models.quant import Quantized
from jaxserve.models.quantize import Ranges, ShardQuantizer
from jaxserve.models.summed_last import SummedLast
from jaxserve.sharding.params import ParamSpec

Progress = Callable[[int, int, str], None]  # bytes done, bytes in total, name of the tensor
# Called with a parameter's path, its axes and the loaded parameter; returns what the tree holds.
Keep = Callable[[ParamPath, str, Any], Any]
Read = Callable[[Ranges], np.ndarray]  # reads the given range of each of a parameter's dimensions


def load_params(
    plan: LoadPlan,
    progress: Progress = lambda done, total, what: None,
    keep: Keep = lambda path, axes, parameter: parameter,
    digests: WeightDigests | None = None,
) -> dict:
    """Load the parameters, one at a time.

    Each tensor is read once, except that a tensor which is quantized here is read twice: for its
    scales, then for its values.

    Args:
        progress: Called with the bytes done, the bytes in total, and the tensor that is read.
        keep: Replaces each loaded parameter in the result, so that a caller who writes parameters
            to a file needs memory for one of them only.
        digests: Digests that get every shard that is read.

    Raises:
        ModelError: A tensor's shape does not follow from config.json, or groups of quantized
            numbers do not fit the mesh.
        CheckpointError: A file is damaged, or a number is NaN or infinite.
    """
    reader = TensorReader(plan.tensors, plan.held)
    total = sum(parameter.nbytes for parameter in plan.parameters)
    done = 0
    leaves = []
    for parameter in plan.parameters:
        progress(done, total, parameter.rows[0].name)
        done += parameter.nbytes
        seen = digests and ParameterDigests(digests, parameter.published, plan.held)
        loaded = _load(parameter, reader, plan.mesh, seen)
        if isinstance(parameter.declared, SummedLast):
            loaded = replace(parameter.declared, weight=loaded)
        leaves.append(keep(parameter.path, parameter.values.axes, loaded))
    progress(total, total, "")
    return jax.tree.structure(plan.declared, is_leaf=is_declaration).unflatten(leaves)


def _load(
    parameter: ParameterPlan, reader: TensorReader, mesh: Mesh, digests: ParameterDigests | None
) -> jax.Array | Quantized:
    """Load the numbers of one parameter; one that is quantized here is rounded on the way."""

    def read(rows: Sequence[Tensor], param: ParamSpec) -> Read:
        return partial(reader.read, rows, param.axes, param.dtype)

    param = parameter.weight
    if isinstance(param, ParamSpec):
        return _sharded(param, mesh, read(parameter.rows, param), digests)
    if parameter.scale_rows:
        read_values = read(parameter.rows, param.values)
        read_scales = read(parameter.scale_rows, param.scales)
    else:
        wide = replace(param.values, dtype=jnp.dtype(jnp.float32))
        quantizer = ShardQuantizer(str(parameter.path[-1]), param, read(parameter.rows, wide))
        read_values = quantizer.values
        read_scales = quantizer.scales
    # Scales come first: groups that a shard's edge would cut are refused here, before the values
    # are read.
    scales = _sharded(param.scales, mesh, read_scales, digests, "scales")
    values = _sharded(param.values, mesh, read_values, digests)
    return replace(param, values=values, scales=scales)


def _sharded(
    param: ParamSpec, mesh: Mesh, read: Read, digests: ParameterDigests | None, kind: str = "values"
) -> jax.Array:
    """Build the parameter's array with one shard at a time in host memory.

    A shard that several devices hold is read once. `kind` is as in ParameterDigests.add.
    """
    stored = param.format(mesh)
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
        formats = [Format(stored.layout, SingleDeviceSharding(device)) for device in devices]
        # Waiting for the transfer lets the host's copy go before the next shard is read.
        copies = jax.block_until_ready(jax.device_put([shard] * len(devices), formats))
        shards |= zip(devices, copies, strict=True)
    return jax.make_array_from_single_device_arrays(
        param.shape, param.sharding(mesh), [shards[device] for device in indices if device in here]
    )
