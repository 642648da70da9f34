"""Carry failures of calls between servers: gRPC statuses on one side, errors on the other."""

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
async def errors_to_status(context: aio.ServicerContext) -> AsyncIterator[None]:
    """Make an error of a call's handler the call's status.

    An unexpected exception is logged here; the other side learns only its type.
    """
    # gRPC keeps the exception of `abort`, and with it this error's frames, in a reference cycle.
    # Clearing the frames frees the segments that they refer to.
    try:
        yield
    except JaxserveError as error:
        clear_frames(error.__traceback__)
        await context.abort(grpc.StatusCode[error.code], str(error))
    except Exception as error:
        log.exception("could not serve a call from another server")
        clear_frames(error.__traceback__)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"{type(error).__name__} (see this server's log)"
        )


@contextmanager
def status_to_errors(call: aio.UnaryStreamCall) -> Iterator[None]:
    """Raise a failure of the call as TransferError; cancel the call when the block ends."""
    try:
        yield
    except aio.AioRpcError as error:
        raise TransferError(
            error.code().name, error.details() or "the call failed", remote=True
        ) from None
    except asyncio.CancelledError:
        # gRPC raises this in the reader, too, when its channel is closed: then the task itself was
        # not asked to cancel.
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        raise TransferError("CANCELLED", "the channel was closed") from None
    finally:
        call.cancel()
