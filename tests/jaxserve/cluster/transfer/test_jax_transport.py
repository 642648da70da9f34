"""Pieces by jax.experimental.transfer."""

import asyncio

from jaxserve.cluster.transfer.shelf import Counts
from tests.jaxserve.cluster.transfer.harness import (
    DTYPES,
    JaxWay,
    piece_of,
    same,
    servers,
)

PIECES = [
    piece_of(64 * (i + 1), 64 * i * (i + 1) // 2, group=i % 2, dtype=dtype, latent=i % 3 == 2, seed=i)
    for i, dtype in enumerate(DTYPES * 2)
]


def test_pieces_come_bit_for_bit_and_in_order() -> None:
    async def main() -> None:
        async with servers(*PIECES, way=JaxWay()) as s:
            found = await s.fetch_all()
            assert len(found) == len(PIECES) and all(map(same, found, PIECES))
            await s.at_rest()
            total = sum(piece.nbytes for piece in PIECES)
            assert s.shelf.counts == Counts(offered=len(PIECES), fetched=len(PIECES), bytes=total)

    asyncio.run(main())
