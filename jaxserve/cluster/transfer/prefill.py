"""Asking another server for a prompt: it offers keys and values piece by piece, as it computes them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.calls import answering, reading
from jaxserve.cluster.transfer.encoding import ticket_from_proto, ticket_to_proto
from jaxserve.cluster.transfer.grpc_transport import Metadata
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.transport import Offering, Receiver, Sender, TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.piece import Piece


@dataclass(frozen=True, slots=True)
class Prompt:
    """salt: of the prefix cache. start: whoever asks has the tokens before it."""

    token_ids: tuple[int, ...]
    salt: str = ""
    start: int = 0


class Source(Protocol):
    """An engine that computes prompts for others."""

    def pieces(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        """What it computes, as soon as it has it; closing it gives the prompt up. A JaxserveError when it refuses."""
        ...


class PrefillServicer(rpc.PrefillServiceServicer):
    """The side that computes. seconds: that each piece is on offer, --transfer-timeout."""

    def __init__(self, source: Source, sender: Sender, handshake: Handshake, seconds: float):
        self._source, self._sender, self._handshake, self._seconds = source, sender, handshake, seconds

    async def Prefill(self, request: pb.PrefillRequest, context: aio.ServicerContext) -> None:
        async with answering(context):
            self._handshake.check(request)
            prompt = Prompt(tuple(request.token_ids), request.salt, request.start)
            async with self._sender.offering() as offering:
                try:
                    await self._offer_all(prompt, offering, context)
                except Exception:
                    await offering.fetched()  # what was computed before is good
                    raise
                await offering.fetched()

    async def _offer_all(self, prompt: Prompt, offering: Offering, context: aio.ServicerContext) -> None:
        async with aclosing(self._source.pieces(prompt)) as pieces:
            async for piece in pieces:
                await self._offer(offering, piece, context)
                del piece  # it is the offering's

    async def _offer(self, offering: Offering, piece: Piece, context: aio.ServicerContext) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        ticket = await offering.offer(piece, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await context.write(ticket_to_proto(ticket))
        except TimeoutError:
            raise TransferError("DEADLINE_EXCEEDED", "an offer was not read in time (--transfer-timeout)") from None


class PrefillClient:
    """The side that goes on from it. metadata: of every call."""

    def __init__(self, channel: aio.Channel, receiver: Receiver, handshake: Handshake, metadata: Metadata = ()):
        self._stub = rpc.PrefillServiceStub(channel)
        self._receiver, self._handshake, self._metadata = receiver, handshake, metadata

    async def pieces(self, prompt: Prompt, deadline: float) -> AsyncGenerator[Piece, None]:
        """What the other server computes, in order; a piece takes up room until the next one is asked for.

        To be closed (contextlib.aclosing): that gives the prompt up. TransferError when not all of it comes by the
        deadline; what came before is good.
        """
        request = pb.PrefillRequest(
            token_ids=prompt.token_ids, salt=prompt.salt, start=prompt.start, **self._handshake.fields()
        )
        seconds = deadline - asyncio.get_running_loop().time()
        call = self._stub.Prefill(request, timeout=max(seconds, 0), metadata=self._metadata)
        with reading(call):
            while (response := await call.read()) is not aio.EOF:
                async with self._receiver.fetch(ticket_from_proto(response), deadline) as piece:
                    yield piece
