"""How the Hopper kernel cuts a grouped product, by chip and shape."""

from typing import Final, NamedTuple

from pallas_kernels.grouped_matmul.api import Demand, Options
from pallas_kernels.hopper import ALIGNMENT, SHARED_BYTES, WARPGROUP_ROWS, cores_of

DEPTH: Final = 64  # of K, that are copied and multiplied together: 128 bytes of a row
STAGED_COLUMNS: Final = 64  # of a result that are handed out together
WIDE, NARROW = (
    256,
    128,
)  # columns of a tile: wide ones, unless there are too few for all multiprocessors
FEW_ROUNDS: Final = 4  # of tiles, on every multiprocessor
MOST_STAGES: Final = 8  # copies under way


class Plan(NamedTuple):
    """A unit of work is a block of rows times a tile of columns of its expert's weight, over all of
    K.
    """

    block: int  # rows
    warpgroups: int  # that multiply, up to 64 rows each
    columns: int  # of a tile
    tiles: int  # of one part of a weight
    parts: int  # C
    steps: int  # of a unit: a stage of DEPTH numbers of K each
    stages: int  # that have room in shared memory
    cores: int  # multiprocessors
    converts: bool  # a weight in 8 bits

    @property
    def rows(self) -> int:
        """Of a tile in shared memory."""
        return self.warpgroups * WARPGROUP_ROWS


def plan_of(options: Options, demand: Demand) -> Plan:
    cores = cores_of(options.device_kind)
    warpgroups = -(-options.block // WARPGROUP_ROWS)
    blocks = demand.rows // options.block * demand.parts
    is_many = blocks * -(-demand.columns // WIDE) >= FEW_ROUNDS * cores
    columns = WIDE if is_many else NARROW
    stage = DEPTH * (columns + warpgroups * WARPGROUP_ROWS) * demand.dtype.itemsize
    staged = warpgroups * WARPGROUP_ROWS * STAGED_COLUMNS * options.out_dtype.itemsize
    if converts := demand.numbers is not None:
        stage += DEPTH * columns * demand.stored_dtype.itemsize
        staged += ALIGNMENT  # the scales of a tile
    return Plan(
        *(options.block, warpgroups, columns, -(-demand.columns // columns), demand.parts),
        steps=-(-demand.contracted // DEPTH),
        stages=min(
            MOST_STAGES, (SHARED_BYTES - staged - 2 * ALIGNMENT) // stage
        ),  # the driver's, barriers
        cores=cores,
        converts=converts,
    )
