"""Ask another server to compute a prompt; it offers keys and values as it computes them.

The server's load is watched all the time, which also tells whether it can be reached and whether it
takes prompts of this server.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.encoding import ticket_from_proto, ticket_to_proto
from jaxserve.cluster.transfer.fetch import Metadata, SegmentReceiver
from jaxserve.cluster.transfer.grpc_status import errors_to_status, status_to_errors
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.offers import OfferStore, PromptOffers
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.kv_segment import KVSegment

REPORT_SECONDS = 0.5  # between two reports of a server's load
SILENCE = 5.0  # seconds without a report after which a server is taken for gone


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPrompt:
    """A prompt that another server shall compute.

    `salt`, `priority` and `client` are those of the request. The caller has the tokens before
    `start`, and makes pages of `page_size` tokens.
    """

    token_ids: tuple[int, ...]
    salt: str = ""
    start: int = 0
    page_size: int
    priority: int = 0
    client: str = ""


class Source(Protocol):
    """An engine that computes prompts for others; every member raises JaxserveError until ready."""

    @property
    def handshake(self) -> Handshake: ...

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts that are not computed yet."""
        ...

    def segments(
        self, prompt: PrefillPrompt, seconds: float | None
    ) -> AsyncGenerator[KVSegment, None]:
        """Yield a prompt's segments as they are computed; closing the generator gives it up.

        `seconds` is the time that the caller will wait for all of them, None for ever.
        """
        ...


class PrefillServicer(rpc.PrefillServiceServicer):
    """The computing side. Each segment is on offer for `seconds`, --transfer-timeout."""

    def __init__(self, source: Source, offers: OfferStore, seconds: float):
        self._source = source
        self._offers = offers
        self._seconds = seconds
        self.open_prompts = 0  # prompts whose segments were not all fetched

    async def Watch(self, request: pb.WatchRequest, context: aio.ServicerContext) -> None:
        async with errors_to_status(context):
            while True:
                # Every time: the source raises as soon as this server drains.
                self._source.handshake.check(request)
                await context.write(pb.WatchResponse(waiting_tokens=self._source.waiting_tokens))
                await asyncio.sleep(REPORT_SECONDS)

    async def Prefill(self, request: pb.PrefillRequest, context: aio.ServicerContext) -> None:
        async with errors_to_status(context):
            self._source.handshake.check(request)
            self.open_prompts += 1
            try:
                await self._serve(request, context)
            finally:
                self.open_prompts -= 1

    async def _serve(self, request: pb.PrefillRequest, context: aio.ServicerContext) -> None:
        async with self._offers.offering() as offers:
            try:
                await self._offer_all(request, offers, context)
            except Exception:
                # The segments before the failure are good: ending the call would withdraw them.
                await offers.fetched()
                raise
            await offers.fetched()

    async def _offer_all(
        self, request: pb.PrefillRequest, offers: PromptOffers, context: aio.ServicerContext
    ) -> None:
        prompt = _prompt_from_proto(request)
        async with aclosing(self._source.segments(prompt, context.time_remaining())) as segments:
            async for segment in segments:
                await self._offer(offers, segment, context)
                del segment  # the store has it, and frees it once it is fetched

    async def _offer(
        self, offers: PromptOffers, segment: KVSegment, context: aio.ServicerContext
    ) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        ticket = await offers.offer(segment, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await context.write(ticket_to_proto(ticket))
        except TimeoutError:
            raise TransferError(
                "DEADLINE_EXCEEDED", "an offer was not read in time (--transfer-timeout)"
            ) from None


class PrefillClient:
    """The side that decodes; `metadata` is sent with every call."""

    def __init__(
        self,
        channel: aio.Channel,
        receiver: SegmentReceiver,
        handshake: Handshake,
        metadata: Metadata = (),
    ):
        self._stub = rpc.PrefillServiceStub(channel)
        self._receiver = receiver
        self._handshake = handshake
        self._metadata = metadata

    async def loads(self) -> AsyncGenerator[int, None]:
        """Yield the other server's load at every report: tokens of prompts not computed yet.

        The generator has to be closed. TransferError when reports end: FAILED_PRECONDITION where
        the other server will take no prompts of this one.
        """
        call = self._stub.Watch(
            pb.WatchRequest(**self._handshake.watch_fields()), metadata=self._metadata
        )
        with status_to_errors(call):
            while True:
                try:
                    async with asyncio.timeout(SILENCE):
                        response = await call.read()
                except TimeoutError:
                    raise TransferError(
                        "DEADLINE_EXCEEDED", f"the server was silent for {SILENCE:g} s"
                    ) from None
                if response is aio.EOF:
                    raise TransferError("UNAVAILABLE", "the server ended the call")
                yield response.waiting_tokens

    async def segments(
        self, prompt: PrefillPrompt, deadline: float
    ) -> AsyncGenerator[KVSegment, None]:
        """Have a prompt computed and yield its segments in order.

        A segment counts against the budget until the next is asked for. The generator has to be
        closed (contextlib.aclosing), which gives the prompt up. TransferError when some do not come
        by the deadline; the segments before are good.
        """
        request = _prompt_to_proto(prompt, self._handshake)
        seconds = deadline - asyncio.get_running_loop().time()
        call = self._stub.Prefill(request, timeout=max(seconds, 0), metadata=self._metadata)
        with status_to_errors(call):
            while (response := await call.read()) is not aio.EOF:
                async with self._receiver.fetch(ticket_from_proto(response), deadline) as segment:
                    yield segment


def _prompt_to_proto(prompt: PrefillPrompt, handshake: Handshake) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        token_ids=prompt.token_ids,
        salt=prompt.salt,
        start=prompt.start,
        page_size=prompt.page_size,
        priority=prompt.priority,
        client=prompt.client,
        **handshake.fields(),
    )


def _prompt_from_proto(request: pb.PrefillRequest) -> PrefillPrompt:
    """Parse a prompt; TransferError INVALID_ARGUMENT for a page size that no engine has."""
    if not request.page_size:
        raise TransferError("INVALID_ARGUMENT", "page_size is 0; it must be at least 1")
    return PrefillPrompt(
        token_ids=tuple(request.token_ids),
        salt=request.salt,
        start=request.start,
        page_size=request.page_size,
        priority=request.priority,
        client=request.client,
    )
