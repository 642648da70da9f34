"""From the parameters of a converted folder back to the tensors that its family publishes.

The weight-name table again, read the other way: Tensor.read of an empty tensor is a view of it, and is written to.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.orbax_store import OrbaxCheckpoint
from checkpoints.safetensors_reader import check_finite
from jaxserve.errors import ModelError
from jaxserve.load import by_parameter, parameter_name, read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.family import Stored, Tensor
from sharding.params import ParamSpec

WITHOUT_HEAD = "embed_tokens.weight"  # of a decoder stored without its head, whose names lack "model."


def hf_tensors(checkpoint: OrbaxCheckpoint) -> Iterator[tuple[str, tuple[int, ...], np.dtype, "Rows"]]:
    """Name, shape and dtype of every tensor, in the table's order, and what `hf_tensor` makes it of.

    dtype: the source's, where what is stored holds its values; half precision was loaded as bfloat16, and stays it.
    """
    family, spec = read_spec(checkpoint.config)
    declared: Any = param_specs(spec, jnp.dtype(jnp.float32))
    rows: dict[str, Rows] = {}
    for path, group in by_parameter(family.tensors(spec)).items():
        param = declared
        for step in path:
            param = param[step]
        stored = checkpoint.tensors.get(parameter_name(path))
        if stored is None:
            raise ModelError(f"{checkpoint.folder}: has no parameter {parameter_name(path)}")
        for row in group:
            rows.setdefault(row.name, []).append((row, param, stored))
    for name, its in rows.items():
        row, _, stored = its[0]
        own = name if WITHOUT_HEAD not in checkpoint.source else name.removeprefix("model.")
        if own not in checkpoint.source:
            raise ModelError(f"{checkpoint.folder}: its source had no tensor {own}")
        shape = tuple(row.shape(spec.sizes(row.block)))
        yield own, shape, _dtype(np.dtype(jnp.dtype(checkpoint.source[own])), stored.dtype), its


Rows = list[tuple[Tensor, ParamSpec, Stored]]


def hf_tensor(checkpoint: OrbaxCheckpoint, shape: tuple[int, ...], dtype: np.dtype, rows: Rows) -> np.ndarray:
    """One of hf_tensors. CheckpointError when a number in it is none."""
    _, spec = read_spec(checkpoint.config)
    tensor = np.empty(shape, dtype)
    for row, param, stored in rows:
        sizes, wanted, index = spec.sizes(row.block), "", list[slice]()
        places = row.places(sizes)
        for letter in param.axes:
            letters, part = places.get(letter, (letter, slice(0, sizes[letter])))
            wanted += letters.strip("()")
            index.append(part)
        values = stored[tuple(index)]
        check_finite(row.name, values)
        view = row.read(tensor, sizes, wanted, {})
        if not np.may_share_memory(view, tensor):
            raise ModelError(f"tensor {row.name} cannot be written ({row.axes})")
        view[...] = values.reshape(view.shape).astype(dtype)
    return tensor


def _dtype(source: np.dtype, stored: np.dtype) -> np.dtype:
    return source if source == stored or source.itemsize < stored.itemsize else stored
