"""Sizes of the TPU kernel's tiles of a quantized weight, by chip and shape."""

from itertools import product
from typing import Final, NamedTuple

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import (
    LEAST_MEMORY,
    MIB,
    TILE_LANES,
    VECTOR_MEMORY,
)

# Up to so many rows of activations are one block of their own height. More are cut into blocks; a
# tile that meets more than one block is kept converted for the next.
FEW: Final = 128
HEIGHTS: Final = (256, 128)  # rows of a block, where there are more than FEW
LOWEST: Final = 64  # rows of a block, where nothing else fits
WIDTHS: Final = (512, 256, 128)  # columns of a tile
CHUNK: Final = 1024  # numbers of K that are converted and multiplied together
SPARED: Final = 8  # a plan leaves one eighth of vector memory; the compiler may take half of that


class Plan(NamedTuple):
    """A tile: `parts` parts of the weight, all of K and `columns` columns of each."""

    rows: int  # of activations in a block
    parts: int
    columns: int
    chunk: int  # numbers of K that are converted together
    keeps_converted: bool  # the converted tile is kept for the next rows
    limit: int  # bytes of vector memory that the compiler may take


def plan_of(
    rows: int, contracted: int, parts: int, columns: int, group: int, device_kind: str
) -> Plan:
    """Return the plan with the largest tile that fits; KernelError when none does."""
    memory = VECTOR_MEMORY.get(device_kind, LEAST_MEMORY) * MIB
    tiles = (
        [(width, rows) for width in WIDTHS]
        if rows <= FEW
        else [*product(WIDTHS, HEIGHTS), (TILE_LANES, LOWEST)]
    )
    for width, height in tiles:
        some_parts, some_columns = _tile(parts, columns, width)
        lanes = -(-some_columns // TILE_LANES) * TILE_LANES
        tile = some_parts * lanes
        chunk = _chunk(contracted)
        kept = rows > height
        numbers = tile * contracted // 2  # bytes: two 4-bit numbers in each
        scales = 4 * tile * contracted // group
        # Two buffers of everything that the pipeline brings; then the converted tile, and a chunk
        # in float32, scaled, and in bfloat16: 10 bytes for each number.
        used = 2 * (numbers + scales + 2 * height * contracted + 4 * height * tile)
        used += (2 * contracted * tile if kept else 0) + 10 * chunk * lanes
        if used <= memory - memory // SPARED:
            return Plan(
                height, some_parts, some_columns, chunk, kept, memory - memory // (2 * SPARED)
            )
    raise KernelError(
        f"a sum over {contracted} numbers leaves no room in {memory} bytes of vector memory for a "
        "tile of the weight (--tensor may make it smaller, or --quantized-matmul reference)"
    )


def _tile(parts: int, columns: int, width: int) -> tuple[int, int]:
    """Return the parts of a tile, and the columns of each.

    They lie beside each other in the result and fill the lanes of its registers.
    """
    if parts == 1:
        return 1, min(width, -(-columns // TILE_LANES) * TILE_LANES)
    if columns < TILE_LANES:
        whole = TILE_LANES // columns
        return next(n for n in range(width // columns, 0, -whole) if parts % n == 0), columns
    wide = next(
        n
        for n in range(min(width, columns) // TILE_LANES * TILE_LANES, 0, -TILE_LANES)
        if columns % n == 0
    )
    some = next(n for n in range(max(width // wide, 1), 0, -1) if parts % n == 0)
    return (some, wide) if wide == columns else (1, wide)


def _chunk(contracted: int) -> int:
    """Return the largest multiple of 128 up to CHUNK that divides K; all of K where none does.

    Sizes of groups divide 128, so that a chunk has whole groups.
    """
    fitting = (
        n
        for n in range(min(CHUNK, contracted) // TILE_LANES * TILE_LANES, 0, -TILE_LANES)
        if contracted % n == 0
    )
    return next(fitting, contracted)
