"""Compiled writers of rows: small programs that change what the device keeps of one sequence.

Each takes the state, which is donated, and returns it with fields of a row replaced.
"""

from dataclasses import replace

import jax
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.engine.device.packed import Packed
from jaxserve.engine.device.state import State


def admit_row(layout: Packed, state: State, packed: Int[Array, "n"]) -> State:
    """Write the small fields of a row that a sequence enters.

    Args:
        layout: Layout of `packed`, see row_packing.admission_layout.
    """
    values = layout.unpack(packed)
    where = values["lane"], values["row"]
    rows = state.rows
    sampling = rows.sampling.at[where].set(values["fields"])
    tables = tuple(
        table.at[where].set(values["table"][group]) for group, table in enumerate(rows.tables)
    )
    length = rows.length.at[where].set(values["length"])
    return replace(state, rows=replace(rows, sampling=sampling, tables=tables, length=length))


def set_counts(state: State, where: Int[Array, "2"], counts: Int[Array, "V"]) -> State:
    """Write the token counts that penalties read, for the lane and row in `where`."""
    return _set_fields(state, where, counts=counts)


def set_bias(
    state: State, where: Int[Array, "2"], ids: Int[Array, "1024"], values: Float[Array, "1024"]
) -> State:
    """Write the logit bias, padded with token id V, for the lane and row in `where`."""
    return _set_fields(state, where, bias_ids=ids, bias_values=values)


def set_masks(state: State, where: Int[Array, "N 2"], masks: UInt32[Array, "N S V/32"]) -> State:
    """Write the masks of allowed tokens of several rows; rows out of range are padding."""
    old = state.rows.fields
    mask = old.mask.at[where[:, 0], where[:, 1]].set(masks, mode="drop")
    return replace(state, rows=replace(state.rows, fields=replace(old, mask=mask)))


def _set_fields(state: State, where: Int[Array, "2"], **values: jax.Array) -> State:
    """Write large fields of the row at (lane, row)."""
    old = state.rows.fields
    new = {
        name: getattr(old, name).at[where[0], where[1]].set(value) for name, value in values.items()
    }
    return replace(state, rows=replace(state.rows, fields=replace(old, **new)))
