"""Sizes of the TPU kernel's tiles of weights, by chip and shape."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import jax

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.grouped_matmul.api import Demand, Options

TILE_LANES: Final = 128  # lanes of a vector register, and of a tile of memory
MIB: Final = 2**20
# Vector memory of a core, in MiB, by device kind.
VECTOR_MEMORY: Final[Mapping[str, int]] = MappingProxyType(
    {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128, "TPU7x": 64}
)
LEAST_MEMORY: Final = 16  # MiB, for chips that the table lacks
SPARED: Final = 8  # one eighth of the memory is left to the compiler
# A tile should be large enough for a fast copy, and no larger: nothing is computed while the first
# one is copied. Since every block of rows meets every tile, larger tiles pay with tall blocks.
TILE_BYTES = 4 * MIB
LARGEST_TILE_BYTES = 32 * MIB
ROW_TIMES: Final = 16  # bytes of a tile, in bytes of a block of rows
WIDTH: Final = 512  # columns that are multiplied together
DEPTH: Final = 1024  # numbers of a quantized column that become x's dtype together
SUBLANES: Final = 8  # a tile has a multiple of so many scales of a column, or all


class Plan(NamedTuple):
    """A tile [C, contracted, columns] of an expert's weight; it spans all of K if it can."""

    contracted: int
    columns: int
    vmem: int  # bytes of vector memory, of two tiles and all that meets them
    limit: int  # bytes that the compiler may take: it spills what registers do not hold


def plan_of(options: Options, demand: Demand) -> Plan:
    """Return the plan with which an expert of two blocks of rows moves the fewest bytes.

    Of equals, the plan with the largest tile is taken. KernelError when no tile fits into memory.
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
    """Return the scales per column of a tile that spans `contracted` numbers of K."""
    return min(demand.scales, max(demand.scales * contracted // demand.contracted, 1))


def _plans(options: Options, demand: Demand, memory: int) -> Iterator[Plan]:
    """Yield the possible plans, also those that do not fit into memory."""
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
            # Two buffers of float32 scales, and the numbers that are dequantized together.
            beside = 2 * parts * _up(scales, SUBLANES) * _lanes(columns) * 4
            beside += DEPTH * WIDTH * (4 + itemsize) if scales else 0
            result = options.block * parts * _lanes(columns)
            sums = 4 if contracted == demand.contracted else 8  # the product, and those before
            vmem = 2 * (tile + rows + result * options.out_dtype.itemsize) + result * sums + beside
            yield Plan(contracted, columns, vmem, min(vmem + vmem // 4 + 2 * MIB, memory))


def _whole_or_parts(contracted: int) -> list[int]:
    """Return K, and the divisors of K that are whole registers."""
    registers = contracted // TILE_LANES if contracted % TILE_LANES == 0 else 0
    return [
        contracted,
        *(TILE_LANES * n for n in range(registers - 1, 0, -1) if registers % n == 0),
    ]


def _cost(plan: Plan, options: Options, demand: Demand) -> tuple[bool, int, int]:
    """Return the cost of a plan, to be compared.

    The entries are: the tile is larger than wanted; bytes moved; the negative size of a tile.
    """
    itemsize = demand.dtype.itemsize
    numbers = demand.parts * plan.contracted * plan.columns
    rows = options.block * demand.contracted * itemsize
    weight = demand.parts * demand.contracted * demand.columns * _bits(demand) // 8
    # A tile over all of K is fetched once per expert; in parts, by both blocks of the expert.
    reads = 1 if plan.contracted == demand.contracted else 2
    moved = reads * weight + 2 * rows * -(-demand.columns // plan.columns)
    wanted = min(max(TILE_BYTES, ROW_TIMES * rows), LARGEST_TILE_BYTES)
    return numbers * _bits(demand) // 8 > wanted, moved, -numbers


def _bits(demand: Demand) -> int:
    """Return the bits of a weight's number; chips pack two numbers of four bits into a byte."""
    return jax.dtypes.itemsize_bits(demand.stored_dtype)


def _lanes(n: int) -> int:
    """Return n rounded up to whole registers."""
    return _up(n, TILE_LANES)


def _up(n: int, step: int) -> int:
    """Return n rounded up to a multiple of step."""
    return -(-n // step) * step
