"""Loads all parameters of a checkpoint onto a mesh, one parameter at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoints.orbax_store import AS_STORED, OrbaxCheckpoint
from jaxserve.errors import ModelError
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.match import by_parameter, match_tensors, stored_tensors
from jaxserve.loading.orbax_layout import choose_weights, match_parameters
from jaxserve.loading.shards import is_float, load_parameter
from jaxserve.loading.spec import Checkpoint, read_architecture
from jaxserve.models.decoder import ALWAYS_FLOAT32, param_specs
from jaxserve.models.families.weight_table import Stored, Tensor
from jaxserve.models.matmul_w8a8 import check_chip
from jaxserve.models.precision import check_dtype
from jaxserve.models.quant import Quantized, parse_scheme
from jaxserve.sharding.params import is_param_spec

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Progress = Callable[[int, int, str], None]  # bytes done, bytes in total, name of the tensor
# Called with a parameter's path, its axes and the loaded parameter; returns what the tree holds.
Keep = Callable[[tuple[str | int, ...], str, Any], Any]


def load_params(
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
    keep: Keep = lambda path, axes, parameter: parameter,
    digests: WeightDigests | None = None,
) -> dict:
    """Load the parameters, each read from the folder straight into its shards.

    The parameters are those of `spec.on(tensor)` for this mesh. Each tensor is read once, except
    that a tensor which is quantized here is read twice: for its scales, then for its values.

    dtype: see `load`. weights: the name of a quantization scheme, or auto for the stored form.
    keep: replaces each loaded parameter in the result, so that a caller who writes parameters to a
    file needs memory for one of them only. digests: get every shard that is read.
    """
    check_dtype(dtype)
    stored = checkpoint.weights if isinstance(checkpoint, OrbaxCheckpoint) else AS_STORED
    scheme = parse_scheme(choose_weights(checkpoint.folder, weights, stored))
    check_chip(scheme, mesh)
    family, spec = read_architecture(checkpoint)
    spread = spec.on(mesh.shape["tensor"])
    tensors = stored_tensors(checkpoint)
    if isinstance(checkpoint, OrbaxCheckpoint):
        table = match_parameters(spec, spread, checkpoint)
    else:
        table = match_tensors(family, spec, tensors)
    kept = DTYPES[dtype] if dtype in DTYPES else _checkpoint_dtype(table, tensors)
    params: Any = param_specs(spread, jnp.dtype(kept), scheme)
    total = _declared_bytes(params)
    done = 0
    published = by_parameter(family.tensors(spec))
    for path, rows in by_parameter(table).items():
        progress(done, total, rows[0].name)
        holder = params
        for step in path[:-1]:
            holder = holder[step]
        declared = holder[path[-1]]
        done += _declared_bytes(declared)
        specs = (spec, spread)
        seen = digests.parameter(published[path], specs) if digests else None
        loaded = load_parameter(str(path[-1]), rows, declared, tensors, specs, mesh, seen)
        axes = declared.values.axes if isinstance(declared, Quantized) else declared.axes
        holder[path[-1]] = keep(path, axes, loaded)
    progress(total, total, "")
    return params


def _declared_bytes(declared: Any) -> int:
    return sum(param.nbytes for param in jax.tree.leaves(declared, is_leaf=is_param_spec))


def _checkpoint_dtype(table: list[Tensor], tensors: Mapping[str, Stored]) -> np.dtype:
    """Return the dtype of --dtype auto: float32 if any weight is stored wider than 16 bits."""
    quantized = {row.path for row in table if row.scales}
    # Parameters that are float32 in every model, and scales, say nothing about the precision.
    stored = {
        tensors[row.name].dtype
        for row in table
        if row.path[-1] not in ALWAYS_FLOAT32 and row.path not in quantized
    }
    if any(not is_float(dtype) for dtype in stored):
        raise ModelError(
            f"the checkpoint stores weights as {', '.join(sorted(map(str, stored)))}; floating "
            f"point is needed"
        )
    return DTYPES["float32"] if any(dtype.itemsize > 2 for dtype in stored) else DTYPES["bfloat16"]
