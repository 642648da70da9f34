"""From the parameters of a converted folder back to the tensors that its family publishes.

The weight-name table again, read the other way: Tensor.read of an empty tensor is a view of it, and
is written to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.orbax_store import AS_THEY_ARE, OrbaxCheckpoint
from checkpoints.safetensors_reader import check_finite
from jaxserve.errors import ModelError
from jaxserve.loading.checkpoint import by_parameter, read_spec
from jaxserve.loading.orbax_layout import parameter_name
from jaxserve.models.decoder import param_specs
from jaxserve.models.families.weight_table import Stored, Tensor
from jaxserve.models.spec import ModelSpec

WITHOUT_HEAD = (
    "embed_tokens.weight"  # of a decoder stored without its head, whose names lack "model."
)


@dataclass(frozen=True, eq=False)
class Published:
    """A tensor that is still to be read.

    dtype: the source's, if what is stored holds its values; half precision was loaded as bfloat16,
    and stays that. rows: with the axes and the array of the parameter that they are in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: ModelSpec
    rows: list[tuple[Tensor, str, Stored]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """CheckpointError when a value is NaN or infinite."""
        tensor = np.empty(self.shape, self.dtype)
        for row, axes, stored in self.rows:
            sizes, wanted, index = row.sizes(self.spec), "", list[slice]()
            places = row.places(sizes)
            for letter in axes:
                letters, part = places.get(letter, (letter, slice(0, sizes[letter])))
                wanted += letters.strip("()")
                index.append(part)
            values = stored[tuple(index)]
            check_finite(row.name, values)
            view = row.read(tensor, sizes, wanted, {})
            assert np.may_share_memory(view, tensor), f"{row.axes} is read as a copy"
            view[...] = values.reshape(view.shape).astype(self.dtype)
        return tensor


def published(checkpoint: OrbaxCheckpoint) -> Iterator[Published]:
    """In the order of the table, under the names that the source had.

    ModelError when they do not fit config.json, or are quantized: the source's numbers are not in
    them.
    """
    if checkpoint.weights != AS_THEY_ARE:
        raise ModelError(
            f"{checkpoint.folder}: has {checkpoint.weights} weights; the source's are not in it"
        )
    family, spec = read_spec(checkpoint.config)
    declared: Any = param_specs(spec, jnp.dtype(jnp.float32))
    rows: dict[str, list[tuple[Tensor, str, Stored]]] = {}
    for path, group in by_parameter(family.tensors(spec)).items():
        param = declared
        for step in path:
            param = param[step]
        stored = checkpoint.tensors.get(parameter_name(path))
        if stored is None:
            raise ModelError(
                f"{checkpoint.folder}: lacks the parameter {parameter_name(path)} that "
                f"config.json asks for"
            )
        for row in group:
            rows.setdefault(row.name, []).append((row, param.axes, stored))
    for name, parts in rows.items():
        row, _, stored = parts[0]
        own = name.removeprefix("model.") if WITHOUT_HEAD in checkpoint.source else name
        if own not in checkpoint.source:
            raise ModelError(
                f"{checkpoint.folder}: its manifest.json does not name {own} among the source's "
                f"tensors"
            )
        source = jnp.dtype(checkpoint.source[own])
        dtype = (
            source
            if source == stored.dtype or source.itemsize < stored.dtype.itemsize
            else stored.dtype
        )
        yield Published(own, tuple(row.shape(row.sizes(spec))), dtype, spec, parts)
