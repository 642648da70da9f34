"""Turns the parameters of a converted folder back into the tensors that its family publishes.

The family's weight table is read in the other direction: Tensor.read of an empty tensor returns a
view of it, and the parameter's values are written through that view.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoints.orbax_store import AS_STORED, OrbaxCheckpoint
from jaxserve.checkpoints.safetensors_reader import check_finite
from jaxserve.errors import ModelError
from jaxserve.loading.orbax_layout import parameter_name
from jaxserve.loading.spec import read_spec
from jaxserve.loading.tensor_names import naming_of, weight_table
from jaxserve.models.declarations import declarations
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import Family, Stored, Tensor, by_parameter
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.params import ParamSpec


@dataclass(frozen=True, eq=False)
class PublishedTensor:
    """A tensor under its published name, read when `read` is called."""

    name: str
    shape: tuple[int, ...]
    # The source's dtype, if it can hold what is stored. Half precision was loaded as bfloat16 and
    # stays bfloat16.
    dtype: np.dtype
    spec: ModelSpec
    # Table rows with the axes and the stored array of their parameter.
    rows: list[tuple[Tensor, str, Stored]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Read the tensor; CheckpointError when a value is NaN or infinite."""
        tensor = np.empty(self.shape, self.dtype)
        for row, axes, stored in self.rows:
            sizes = row.sizes(self.spec)
            fused = row.fused_slices(sizes)
            wanted = ""
            index = list[slice]()
            for letter in axes:
                letters, part = fused.get(letter, (letter, slice(0, sizes[letter])))
                wanted += letters.strip("()")
                index.append(part)
            values = stored[tuple(index)]
            check_finite(row.name, values)
            view = row.read(tensor, sizes, wanted, {})
            assert np.may_share_memory(view, tensor), f"{row.axes} is read as a copy"
            view[...] = values.reshape(view.shape).astype(self.dtype)
        return tensor


def published_tensors(checkpoint: OrbaxCheckpoint) -> Iterator[PublishedTensor]:
    """Yield the tensors in the order of the weight table, under the names that the source had.

    ModelError when the parameters do not fit config.json, or are quantized: then the source's
    values are lost.
    """
    if checkpoint.weights != AS_STORED:
        raise ModelError(
            f"{checkpoint.folder} has {checkpoint.weights} weights; the source's are not in it"
        )
    family, spec = read_spec(checkpoint.config)
    if family.towers:
        raise ModelError(
            f"{checkpoint.folder} has the text part of a model with {' and '.join(family.towers)}; "
            "the source's tensors of those are not in it"
        )
    by_tensor: dict[str, list[tuple[Tensor, str, Stored]]] = {}
    # One published tensor can be parts of several parameters, such as a fused qkv_proj.
    for row, axes, stored in _rows(checkpoint, family, spec):
        by_tensor.setdefault(row.name, []).append((row, axes, stored))
    for name, rows in by_tensor.items():
        row, _, stored = rows[0]
        if name not in checkpoint.source:
            raise ModelError(
                f"{checkpoint.folder}: its manifest.json does not name {name} among the source's "
                f"tensors"
            )
        source = jnp.dtype(checkpoint.source[name])
        narrower = source.itemsize < stored.dtype.itemsize
        dtype = source if source == stored.dtype or narrower else stored.dtype
        yield PublishedTensor(name, tuple(row.shape(row.sizes(spec))), dtype, spec, rows)


def _rows(
    checkpoint: OrbaxCheckpoint, family: Family, spec: ModelSpec
) -> Iterator[tuple[Tensor, str, Stored]]:
    """Yield the rows of the weight table, each with its parameter's axes and stored array."""
    declared = declarations(param_specs(spec, jnp.dtype(jnp.float32)))
    axes = {path: param.axes for path, param in declared if isinstance(param, ParamSpec)}
    naming = naming_of(checkpoint.source)
    table = weight_table(family, spec, naming, checkpoint.source)
    for path, group in by_parameter(table).items():
        stored = checkpoint.tensors.get(parameter_name(path))
        if stored is None:
            raise ModelError(
                f"{checkpoint.folder} lacks the parameter {parameter_name(path)} that "
                f"config.json asks for"
            )
        for row in group:
            yield row, axes[path], stored
