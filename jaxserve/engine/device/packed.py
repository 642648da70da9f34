"""Packed int32 arrays: named fields in one array, laid out for host and device alike.

What a launch needs are dozens of small arrays. Packed into one, they cost one transfer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
            value = values[name].astype(dtype)
            if dtype is not np.int32:
                value = lax.bitcast_convert_type(value, jnp.int32)
            lead = value.shape[: value.ndim - len(shape)]
            parts.append(value.reshape(*lead, prod(shape)))
        return jnp.concatenate(parts, axis=-1)

    def unpack(self, array: jax.Array) -> dict[str, jax.Array]:
        """Unpack [*lead, size] into fields of shape [*lead, *shape] on the device."""
        values = {}
        offset = 0
        for name, shape, dtype in self.fields:
            part = array[..., offset : offset + prod(shape)].reshape(*array.shape[:-1], *shape)
            values[name] = part if dtype is np.int32 else lax.bitcast_convert_type(part, dtype)
            offset += prod(shape)
        return values

    def unpack_on_host(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of one lane's [size] array as views of it."""
        values = {}
        offset = 0
        for name, shape, dtype in self.fields:
            values[name] = array[offset : offset + prod(shape)].view(dtype).reshape(shape)
            offset += prod(shape)
        return values


def padded(column: list[int], size: int, fill: int) -> np.ndarray:
    """Return the column as [size] int32, filled up at its end."""
    array = np.full(size, fill, np.int32)
    array[: len(column)] = column
    return array
