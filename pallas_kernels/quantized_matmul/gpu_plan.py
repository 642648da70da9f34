"""How the Hopper kernel cuts a quantized product, by chip and shape."""

from typing import Final, NamedTuple

import jax.numpy as jnp

from pallas_kernels.hopper import ALIGNMENT, SHARED_BYTES, WARPGROUP_ROWS, cores_of

DEPTHS: Final = (128, 64)  # of K, that are copied together: 64 or 32 bytes of a weight's column
WARPGROUPS: Final = 2  # that multiply, 64 columns of the weight each
LEAST_ROWS, MOST_ROWS = (
    8,
    128,
)  # of a tile: two sums of 64 x 128 are half of a warpgroup's registers
STAGED_ROWS: Final = 32  # of a result that are handed out together
MOST_SPLITS: Final = 8  # of K, where there are too few tiles for all multiprocessors
LEAST_STEPS: Final = 4  # that a split is worth
MOST_STAGES: Final = 8  # copies under way


class Plan(NamedTuple):
    """A unit of work is a tile of columns times a tile of rows, over one split of K."""

    group: int  # g
    rows: int  # of a tile
    row_tiles: int
    column_tiles: int
    splits: int
    depth: int  # of a stage
    steps: int  # of all of K
    stages: int  # that have room in shared memory
    cores: int  # multiprocessors

    @property
    def columns(self) -> int:
        """Of a tile."""
        return WARPGROUPS * WARPGROUP_ROWS

    @property
    def scales(self) -> int:
        """Of a column, in a stage."""
        return self.depth // self.group

    @property
    def staged(self) -> int:
        """Rows that are handed out together."""
        return min(self.rows, STAGED_ROWS)

    @property
    def units(self) -> int:
        return self.splits * self.column_tiles * self.row_tiles


def plan_of(rows: int, contracted: int, columns: int, group: int, device_kind: str) -> Plan:
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
