"""Sizes of the Hopper kernel of the quantized product, by chip and shape."""

from typing import Final, NamedTuple

import jax.numpy as jnp

from jaxserve.pallas_kernels.hopper import ALIGNMENT, SHARED_BYTES, WARPGROUP_ROWS, cores_of

DEPTHS: Final = (128, 64)  # numbers of K copied together: 64 or 32 bytes of a weight's column
WARPGROUPS: Final = 2  # warpgroups that multiply, 64 columns of the weight each
# Rows of a tile: two sums of 64 x 128 are half of a warpgroup's registers.
LEAST_ROWS: Final = 8
MOST_ROWS: Final = 128
STAGED_ROWS: Final = 32  # rows of a result that are written together
MOST_SPLITS: Final = 8  # parts of K, where there are too few tiles for all multiprocessors
LEAST_STEPS: Final = 4  # steps that make a split of K worthwhile
MOST_STAGES: Final = 8  # stages that are in flight


class Plan(NamedTuple):
    """Sizes of a unit of work: a tile of columns times a tile of rows, over one split of K."""

    group: int  # g
    rows: int  # rows of a tile
    row_tiles: int
    column_tiles: int
    splits: int
    depth: int  # numbers of K in a stage
    steps: int  # stages of all of K
    stages: int  # that have room in shared memory
    cores: int  # multiprocessors

    @property
    def columns(self) -> int:
        """Return the columns of a tile."""
        return WARPGROUPS * WARPGROUP_ROWS

    @property
    def scales(self) -> int:
        """Return the scales of a column in a stage."""
        return self.depth // self.group

    @property
    def staged(self) -> int:
        """Return the rows that are written together."""
        return min(self.rows, STAGED_ROWS)

    @property
    def units(self) -> int:
        """Return the number of units."""
        return self.splits * self.column_tiles * self.row_tiles


def plan_of(rows: int, contracted: int, columns: int, group: int, device_kind: str) -> Plan:
    """Return the plan of a product, with as many stages as shared memory has room for."""
    depth = next(depth for depth in DEPTHS if contracted % depth == 0)
    cores = cores_of(device_kind)
    steps = contracted // depth
    tall = min(max(LEAST_ROWS, 1 << max(rows - 1, 0).bit_length()), MOST_ROWS)
    row_tiles = -(-rows // tall)
    column_tiles = -(-columns // (WARPGROUPS * WARPGROUP_ROWS))
    splits = max(1, min(cores // (row_tiles * column_tiles), MOST_SPLITS, steps // LEAST_STEPS))
    plan = Plan(group, tall, row_tiles, column_tiles, splits, depth, steps, MOST_STAGES, cores)
    numbers = depth * (4 * plan.columns + 16 * tall) // 8  # bytes: int4, bfloat16
    stage = numbers + -(-plan.scales * plan.columns * 4 // ALIGNMENT) * ALIGNMENT
    staged = plan.columns * plan.staged * jnp.dtype(jnp.float32).itemsize
    return plan._replace(stages=min(MOST_STAGES, (SHARED_BYTES - staged - 2 * ALIGNMENT) // stage))
