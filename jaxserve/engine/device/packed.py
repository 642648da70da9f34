"""Packed int32 arrays: named fields in one array, laid out for host and device alike.

What a launch needs are dozens of small arrays. Packed into one, they cost one transfer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Packed:
    """Layout of named fields, one after the other in the last axis of an int32 array.

    Floats and uint32 travel as their bits.
    """

    fields: tuple[tuple[str, tuple[int, ...], type], ...]

    @cached_property
    def _places(self) -> dict[str, tuple[int, tuple[int, ...], type]]:
        """Beginning, shape and dtype of each field."""
        places = {}
        begin = 0
        for name, shape, dtype in self.fields:
            places[name] = begin, shape, dtype
            begin += prod(shape)
        return places

    @property
    def size(self) -> int:
        return sum(prod(shape) for _, shape, _ in self.fields)

    def pack(self, values: Mapping[str, Any]) -> np.ndarray:
        """Pack fields into [size] int32 on the host."""
        parts = [
            np.asarray(values[name], dtype).reshape(-1).view(np.int32)
            for name, _, dtype in self.fields
        ]
        return np.concatenate(parts)

    def pack_on_device(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """Pack fields of shape [*lead, *shape] into [*lead, size] int32."""
        parts = []
        for name, shape, dtype in self.fields:
            value = _bits(values[name].astype(dtype))
            lead = value.shape[: value.ndim - len(shape)]
            parts.append(value.reshape(*lead, prod(shape)))
        return jnp.concatenate(parts, axis=-1)

    def unpack(self, array: jax.Array) -> dict[str, jax.Array]:
        """Unpack [*lead, size] into fields of shape [*lead, *shape] on the device."""
        return {name: self.unpack_field(array, name) for name, _, _ in self.fields}

    def unpack_field(self, array: jax.Array, name: str) -> jax.Array:
        """Unpack one field of [*lead, size], in the shape [*lead, *shape], on the device."""
        begin, shape, dtype = self._places[name]
        part = lax.slice_in_dim(array, begin, begin + prod(shape), axis=-1)
        part = part.reshape(*array.shape[:-1], *shape)
        return part if dtype is np.int32 else lax.bitcast_convert_type(part, dtype)

    def replace_fields(self, array: jax.Array, **values: jax.Array) -> jax.Array:
        """Return [*lead, size] with these fields replaced, each [*lead, *shape], on the device.

        TypeError for a value that does not have its field's dtype.
        """
        for name, value in values.items():
            begin, shape, dtype = self._places[name]
            if value.dtype != dtype:
                raise TypeError(f"{name} is {value.dtype}; the field is {np.dtype(dtype)}")
            lead = array.shape[:-1]
            part = _bits(value).reshape(*lead, prod(shape))
            array = lax.dynamic_update_slice_in_dim(array, part, begin, axis=-1)
        return array

    def unpack_on_host(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of one lane's [size] array as views of it."""
        return {
            name: array[begin : begin + prod(shape)].view(dtype).reshape(shape)
            for name, (begin, shape, dtype) in self._places.items()
        }


def _bits(value: jax.Array) -> jax.Array:
    """Return the bits of a field as int32."""
    return value if value.dtype == np.int32 else lax.bitcast_convert_type(value, jnp.int32)


def padded(column: list[int], size: int, fill: int) -> np.ndarray:
    """Return the column as [size] int32, filled up at its end."""
    array = np.full(size, fill, np.int32)
    array[: len(column)] = column
    return array
