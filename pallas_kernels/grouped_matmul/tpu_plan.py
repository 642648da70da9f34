"""How the TPU kernel cuts weights into tiles, by chip and shape."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import jax

from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul.api import Demand, Options

TILE_LANES: Final = 128  # of a vector register
MIB: Final = 2**20
VECTOR_MEMORY: Final[Mapping[str, int]] = MappingProxyType(  # of a core, in MiB
    {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128, "TPU7x": 64}
)
LEAST_MEMORY: Final = 16
SPARED: Final = 8  # one part in so many, for what the compiler puts there beside
# A tile is to be large enough for a fast copy, and no larger: nothing is computed while the first
# one is copied. But every block of rows meets every tile, so that with tall blocks larger ones are
# worth it.
TILE_BYTES = 4 * MIB
LARGEST_TILE_BYTES = 32 * MIB
ROW_TIMES: Final = 16  # so many times the bytes of a block of rows
WIDTH: Final = 512  # columns that are multiplied together
DEPTH: Final = 1024  # numbers of a quantized column that become x's dtype together
SUBLANES: Final = 8  # scales of a column that are copied are a multiple, or all


class Plan(NamedTuple):
    """A tile is [C, contracted, columns] of an expert's weight: all of K, if it can be."""

    contracted: int
    columns: int
    vmem: int  # bytes of vector memory, of two tiles and all that meets them
    limit: int  # bytes that the compiler may take: it spills what registers do not hold


def plan_of(options: Options, demand: Demand) -> Plan:
    """Of the tiles that fit, those with which an expert of two blocks moves the fewest bytes; of
    these the largest.
    """
    memory = VECTOR_MEMORY.get(options.device_kind, LEAST_MEMORY) * MIB
    plans = [
        plan for plan in _plans(options, demand, memory) if plan.vmem <= memory - memory // SPARED
    ]
    if not plans:
        raise KernelError(
            f"a block of {options.block} rows leaves no room in {memory} bytes of vector memory "
            f"for a tile of a weight {demand.parts} x {demand.contracted} x {demand.columns} in "
            f"{demand.stored_dtype} (--tensor makes it smaller)"
        )
    return min(plans, key=lambda plan: _cost(plan, options, demand))


def scales_of(demand: Demand, contracted: int) -> int:
    """Of a column of a tile with so many numbers of it: one, where all of it has one."""
    return min(demand.scales, max(demand.scales * contracted // demand.contracted, 1))


def _plans(options: Options, demand: Demand, memory: int) -> Iterator[Plan]:
    itemsize = demand.dtype.itemsize
    parts = demand.parts
    for contracted in _whole_or_parts(demand.contracted):
        scales = scales_of(demand, contracted)
        if contracted < demand.contracted and demand.scales > 1 and scales % SUBLANES:
            continue
        rows = options.block * _lanes(contracted) * itemsize
        for count in range(1, -(-demand.columns // TILE_LANES) + 1):
            columns = demand.columns if count == 1 else _lanes(-(-demand.columns // count))
            tile = parts * contracted * _lanes(columns) * _bits(demand) // 8
            beside = (
                2 * parts * _up(scales, SUBLANES) * _lanes(columns) * 4
            )  # scales, and what numbers become
            beside += DEPTH * WIDTH * (4 + itemsize) if scales else 0
            result = options.block * parts * _lanes(columns)
            sums = 4 if contracted == demand.contracted else 8  # the product, and those before
            vmem = 2 * (tile + rows + result * options.out_dtype.itemsize) + result * sums + beside
            yield Plan(contracted, columns, vmem, min(vmem + vmem // 4 + 2 * MIB, memory))


def _whole_or_parts(contracted: int) -> list[int]:
    """K, and what divides it into parts of whole registers."""
    registers = contracted // TILE_LANES if contracted % TILE_LANES == 0 else 0
    return [
        contracted,
        *(TILE_LANES * n for n in range(registers - 1, 0, -1) if registers % n == 0),
    ]


def _cost(plan: Plan, options: Options, demand: Demand) -> tuple[bool, int, int]:
    """Whether a tile is larger than wanted; bytes moved; fewer numbers in a tile."""
    itemsize = demand.dtype.itemsize
    numbers = demand.parts * plan.contracted * plan.columns
    rows = options.block * demand.contracted * itemsize
    weight = demand.parts * demand.contracted * demand.columns * _bits(demand) // 8
    reads = (
        1 if plan.contracted == demand.contracted else 2
    )  # by every block, if it takes several tiles to sum up
    moved = reads * weight + 2 * rows * -(-demand.columns // plan.columns)
    wanted = min(max(TILE_BYTES, ROW_TIMES * rows), LARGEST_TILE_BYTES)
    return numbers * _bits(demand) // 8 > wanted, moved, -numbers


def _bits(demand: Demand) -> int:
    """Of a weight's number: chips pack two of four bits into a byte."""
    return jax.dtypes.itemsize_bits(demand.stored_dtype)


def _lanes(n: int) -> int:
    return _up(n, TILE_LANES)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
