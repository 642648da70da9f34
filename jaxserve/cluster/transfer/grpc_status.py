"""Failures of calls between servers: errors become statuses on one side, and errors again on the
other.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from traceback import clear_frames

import grpc
from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.errors import JaxserveError

log = logging.getLogger(__name__)


@asynccontextmanager
async def answering(context: aio.ServicerContext) -> AsyncIterator[None]:
    """Around a call's handler: what it raises is the call's status. Of a bug the other side learns
    no more.

    gRPC keeps what `abort` raises, in a cycle, and with it the error's frames: they let go of what
    they hold.
    """
    try:
        yield
    except JaxserveError as error:
        clear_frames(error.__traceback__)
        await context.abort(grpc.StatusCode[error.code], str(error))
    except Exception as error:
        log.exception("a call of another server failed")
        clear_frames(error.__traceback__)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"{type(error).__name__} (see this server's log)"
        )


@contextmanager
def reading(call: aio.UnaryStreamCall) -> Iterator[None]:
    """Around reading a call: it ends with the block, and its failure is a TransferError with its
    code and text.
    """
    try:
        yield
    except aio.AioRpcError as error:
        raise TransferError(
            error.code().name, error.details() or "the call failed", remote=True
        ) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        raise TransferError("CANCELLED", "the channel was closed") from None  # gRPC says it so
    finally:
        call.cancel()
