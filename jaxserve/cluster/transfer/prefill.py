"""Asking another server for a prompt: it offers keys and values piece by piece, as it computes
them.

Before that its load is watched: that says whether it is there, and whether it takes prompts of this
server at all.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.encoding import ticket_from_proto, ticket_to_proto
from jaxserve.cluster.transfer.fetch import Metadata, Receiver
from jaxserve.cluster.transfer.grpc_status import answering, reading
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.offers import Offering, Shelf
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.kv_segment import KVSegment

TELLING = 0.5  # seconds from one word of a server's load to the next
SILENCE = 5.0  # seconds without one, and it is taken for gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """salt: of the prefix cache. start: whoever asks has the tokens before it. page_size: tokens of
    its pages.

    priority: as Request has it.
    """

    token_ids: tuple[int, ...]
    salt: str = ""
    start: int = 0
    page_size: int
    priority: int = 0


class Source(Protocol):
    """An engine that computes prompts for others. All of it raises a JaxserveError while it takes
    none.
    """

    @property
    def handshake(self) -> Handshake: ...

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts that are not computed yet."""
        ...

    def pieces(self, prompt: Prompt, seconds: float | None) -> AsyncGenerator[KVSegment, None]:
        """What it computes, as soon as it has it; closing it gives the prompt up.

        seconds: that whoever asks will wait for all of it; None: for ever.
        """
        ...


class PrefillServicer(rpc.PrefillServiceServicer):
    """The side that computes. seconds: that each piece is on offer, --transfer-timeout."""

    def __init__(self, source: Source, shelf: Shelf, seconds: float):
        self._source, self._shelf, self._seconds = source, shelf, seconds
        self.open = 0  # prompts whose pieces were not all fetched

    async def Watch(self, request: pb.WatchRequest, context: aio.ServicerContext) -> None:
        async with answering(context):
            while True:
                self._source.handshake.check(request)
                await context.write(pb.WatchResponse(waiting_tokens=self._source.waiting_tokens))
                await asyncio.sleep(TELLING)

    async def Prefill(self, request: pb.PrefillRequest, context: aio.ServicerContext) -> None:
        async with answering(context):
            self._source.handshake.check(request)
            self.open += 1
            try:
                await self._give(request, context)
            finally:
                self.open -= 1

    async def _give(self, request: pb.PrefillRequest, context: aio.ServicerContext) -> None:
        async with self._shelf.offering() as offering:
            try:
                await self._offer_all(request, offering, context)
            except Exception:
                await offering.fetched()  # what was computed before is good
                raise
            await offering.fetched()

    async def _offer_all(
        self, request: pb.PrefillRequest, offering: Offering, context: aio.ServicerContext
    ) -> None:
        prompt = _prompt_from_proto(request)
        async with aclosing(self._source.pieces(prompt, context.time_remaining())) as pieces:
            async for piece in pieces:
                await self._offer(offering, piece, context)
                del piece  # it is the offering's

    async def _offer(
        self, offering: Offering, piece: KVSegment, context: aio.ServicerContext
    ) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        ticket = await offering.offer(piece, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await context.write(ticket_to_proto(ticket))
        except TimeoutError:
            raise TransferError(
                "DEADLINE_EXCEEDED", "an offer was not read in time (--transfer-timeout)"
            ) from None


class PrefillClient:
    """The side that goes on from it. metadata: of every call."""

    def __init__(
        self,
        channel: aio.Channel,
        receiver: Receiver,
        handshake: Handshake,
        metadata: Metadata = (),
    ):
        self._stub = rpc.PrefillServiceStub(channel)
        self._receiver, self._handshake, self._metadata = receiver, handshake, metadata

    async def loads(self) -> AsyncGenerator[int, None]:
        """Tokens of prompts that it has not computed yet, whenever it tells, for ever; to be
        closed.

        TransferError when nothing comes any more: FAILED_PRECONDITION where it will take no prompts
        of this server.
        """
        call = self._stub.Watch(
            pb.WatchRequest(**self._handshake.fields()), metadata=self._metadata
        )
        with reading(call):
            while True:
                try:
                    async with asyncio.timeout(SILENCE):
                        response = await call.read()
                except TimeoutError:
                    raise TransferError(
                        "DEADLINE_EXCEEDED", f"it was silent for {SILENCE:g} s"
                    ) from None
                if response is aio.EOF:
                    raise TransferError("UNAVAILABLE", "it ended the call")
                yield response.waiting_tokens

    async def pieces(self, prompt: Prompt, deadline: float) -> AsyncGenerator[KVSegment, None]:
        """What the other server computes, in order; a piece takes up room until the next one is
        asked for.

        To be closed (contextlib.aclosing): that gives the prompt up. TransferError when not all of
        it comes by the deadline; what came before is good.
        """
        request = _prompt_to_proto(prompt, self._handshake)
        seconds = deadline - asyncio.get_running_loop().time()
        call = self._stub.Prefill(request, timeout=max(seconds, 0), metadata=self._metadata)
        with reading(call):
            while (response := await call.read()) is not aio.EOF:
                async with self._receiver.fetch(ticket_from_proto(response), deadline) as piece:
                    yield piece


def _prompt_to_proto(prompt: Prompt, handshake: Handshake) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        token_ids=prompt.token_ids,
        salt=prompt.salt,
        start=prompt.start,
        page_size=prompt.page_size,
        priority=prompt.priority,
        **handshake.fields(),
    )


def _prompt_from_proto(request: pb.PrefillRequest) -> Prompt:
    """TransferError INVALID_ARGUMENT for what no engine has."""
    if not request.page_size:
        raise TransferError("INVALID_ARGUMENT", "page_size: is 0; pages have at least a token")
    return Prompt(
        token_ids=tuple(request.token_ids),
        salt=request.salt,
        start=request.start,
        page_size=request.page_size,
        priority=request.priority,
    )
