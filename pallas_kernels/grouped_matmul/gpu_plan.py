"""Sizes of the Hopper kernel of the grouped product, by chip and shape."""

from typing import Final, NamedTuple

from jaxserve.pallas_kernels.grouped_matmul.api import Demand, Options
from jaxserve.pallas_kernels.hopper import ALIGNMENT, SHARED_BYTES, WARPGROUP_ROWS, cores_of

DEPTH: Final = 64  # numbers of K that are copied and multiplied together: 128 bytes of a row
STAGED_COLUMNS: Final = 64  # columns of a result that are written together
# Columns of a tile: wide ones, unless those are too few for all multiprocessors.
WIDE: Final = 256
NARROW: Final = 128
FEW_ROUNDS: Final = 4  # wide tiles for every multiprocessor that are enough
MOST_STAGES: Final = 8  # stages that are in flight


class Plan(NamedTuple):
    """Sizes of a unit of work: a block of rows times a tile of columns, over all of K."""

    block: int  # rows
    warpgroups: int  # that multiply, up to 64 rows each
    columns: int  # of a tile
    tiles: int  # of one part of a weight
    parts: int  # C
    steps: int  # of a unit: each fills a stage with DEPTH numbers of K
    stages: int  # that have room in shared memory
    cores: int  # multiprocessors
    converts: bool  # a weight in 8 bits

    @property
    def rows(self) -> int:
        """Return the rows of a stage in shared memory, whole warpgroups' 64 rows."""
        return self.warpgroups * WARPGROUP_ROWS


def plan_of(options: Options, demand: Demand) -> Plan:
    """Return the plan of a product."""
    cores = cores_of(options.device_kind)
    warpgroups = -(-options.block // WARPGROUP_ROWS)
    blocks = demand.rows // options.block * demand.parts
    is_many = blocks * -(-demand.columns // WIDE) >= FEW_ROUNDS * cores
    columns = WIDE if is_many else NARROW
    stage = DEPTH * (columns + warpgroups * WARPGROUP_ROWS) * demand.dtype.itemsize
    staged = warpgroups * WARPGROUP_ROWS * STAGED_COLUMNS * options.out_dtype.itemsize
    converts = demand.numbers is not None
    if converts:
        stage += DEPTH * columns * demand.stored_dtype.itemsize
        staged += ALIGNMENT  # the scales of a tile
    return Plan(
        *(options.block, warpgroups, columns, -(-demand.columns // columns), demand.parts),
        steps=-(-demand.contracted // DEPTH),
        # Two alignments of memory are the driver's and the barriers'.
        stages=min(MOST_STAGES, (SHARED_BYTES - staged - 2 * ALIGNMENT) // stage),
        cores=cores,
        converts=converts,
    )
