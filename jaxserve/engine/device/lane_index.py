"""Gathers and scatters lane for lane: the first axis of a field and of its indices is the same.

Each is one operation of XLA. What `x.at[...]` under `jax.vmap` puts around it, for negative indices
that no step has, took a fifth of the time in which a step is traced and lowered: here, an index
below zero is out of range, too.

In shapes, A counts lanes. A field has an axis for each index behind that of the lanes.
"""

import jax
from jax import lax
from jaxtyping import Array, Int


def take(field: jax.Array, *index: Int[Array, "A *n"]) -> jax.Array:
    """Return field[a, index[a, ...], ...] as [A, *n, ...].

    An index out of range is padding and gives an arbitrary entry.
    """
    indexed = tuple(range(1, 1 + len(index)))
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=_window(field, index),
        collapsed_slice_dims=indexed,
        start_index_map=indexed,
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    sizes = (1,) * (1 + len(index)) + field.shape[1 + len(index) :]
    return lax.gather(field, _places(index), dimensions, sizes, mode="clip")


def put(field: jax.Array, value: jax.Array, *index: Int[Array, "A *n"]) -> jax.Array:
    """Return the field with field[a, index[a, ...], ...] = value[a, ...].

    An index out of range is padding; its value is dropped.
    """
    dimensions = _scatter_dimensions(field, index)
    return lax.scatter(field, _places(index), value, dimensions, mode="drop")


def add(field: jax.Array, value: jax.Array, *index: Int[Array, "A *n"]) -> jax.Array:
    """Return the field with each value added to its entry, also where several have the same.

    An index out of range is padding; its value is dropped.
    """
    dimensions = _scatter_dimensions(field, index)
    return lax.scatter_add(field, _places(index), value, dimensions, mode="drop")


def _places(index: tuple[jax.Array, ...]) -> Int[Array, "A *n k"]:
    """Return the indices side by side, as gathers and scatters take them."""
    return lax.concatenate([lax.expand_dims(i, [i.ndim]) for i in index], index[0].ndim)


def _window(field: jax.Array, index: tuple[jax.Array, ...]) -> tuple[int, ...]:
    """Return the axes of values that no index chooses; they come behind those of the indices."""
    count = field.ndim - 1 - len(index)
    return tuple(range(index[0].ndim, index[0].ndim + count))


def _scatter_dimensions(
    field: jax.Array, index: tuple[jax.Array, ...]
) -> lax.ScatterDimensionNumbers:
    indexed = tuple(range(1, 1 + len(index)))
    return lax.ScatterDimensionNumbers(
        update_window_dims=_window(field, index),
        inserted_window_dims=indexed,
        scatter_dims_to_operand_dims=indexed,
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
