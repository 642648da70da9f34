"""jax.experimental.transfer: arrays are offered in one process and pulled in another, through sockets of its own.

It works on the CPU backend's arrays, which are the host's memory: on a GPU or a TPU as well, pieces come from there and
are uploaded there by the engine. What has to be known of it, of jax 0.11.2 and 0.12.0.1:

- Nothing of it ends. A pull whose arrays nobody offers waits for ever, and so does one from a process that is not there;
  timeouts that are given to it are ignored. An offer stays in memory until all of its arrays are pulled. A pull fails at
  once, and cleanly, where the other process ends.
- All pulls from one process share 8 buffers of 1 MiB. One side that has asked for an array and stops reading, without
  closing its connection, holds back everybody else's until it goes on or ends.
- Whoever reaches its ports needs no token and sees the bytes, and a message that is not of its protocol ends the process.
  So does a connection between its ports that fails half way. It is for a network that only these servers reach.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxserve.cluster.transfer.transport import Array, TransferError
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jax.experimental.transfer import TransferConnection, TransferServer

BUFFER = 2**20  # bytes that are copied and sent at a time
BUFFERS = 8
SOCKETS = 4  # of a connection, besides the one that asks
POLL = 0.001  # seconds
NOWHERE = ("", "0.0.0.0", "::", "[::]")


class JaxTransfer:
    """This process's end, which offers and pulls. address: HOST:PORT, where others find it.

    Arrays are put and pulled within an event loop's thread. Nothing of it is compiled.
    """

    def __init__(self, host: str, port: int = 0):
        """host: as other servers reach this one. ConfigError where that is no address of its own, or jax has no such part."""
        if host in NOWHERE:
            raise ConfigError(f"--transport jax: {host or 'no address'!r} is none that other servers reach: name one")
        self._device = jax.local_devices(backend="cpu")[0]
        self._sharding = SingleDeviceSharding(self._device)
        self._server = _start(self._device.client, host, port)
        self.address = self._server.address()

    async def put(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        """As it takes them. Copied where they do not begin at a multiple of 64 bytes."""
        return await asyncio.to_thread(jax.device_put, list(arrays), self._device)

    def offer(self, arrays: Sequence[jax.Array]) -> int:
        """The random number under which they may be pulled, once."""
        uuid = secrets.randbits(63)
        self._server.await_pull(uuid, arrays)
        return uuid

    async def connect(self, address: str) -> "TransferConnection":
        """It succeeds whether somebody is there or not. TransferError for what is no address."""
        try:
            return await asyncio.to_thread(self._server.connect, address)  # it looks names up
        except jax.errors.JaxRuntimeError as error:
            raise TransferError("UNAVAILABLE", f"{address!r:.60} is no address: {_line(error)}") from None

    async def pull(self, connection: "TransferConnection", uuid: int, arrays: Sequence[Array]) -> list[np.ndarray]:
        """Wait for them, if need be for ever: what has been asked for comes even if nobody waits for it any more.

        TransferError UNAVAILABLE when the other side ends before, or has other arrays under this number.
        """
        avals = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._sharding) for array in arrays]
        pulled = connection.pull(uuid, avals)
        await _ready(pulled)
        try:
            return [np.asarray(array) for array in pulled]
        except jax.errors.JaxRuntimeError as error:
            raise TransferError("UNAVAILABLE", f"jax.experimental.transfer: {_line(error)}") from None

    async def drain(self, uuid: int, arrays: Sequence[jax.Array]) -> None:
        """An offer that is over is forgotten once it is pulled: here. Offered again before, for if it was pulled
        already, the pull would wait for ever. The arrays are in memory twice meanwhile."""
        self._server.await_pull(uuid, arrays)
        itself = await self.connect(self.address)
        await _ready(itself.pull(uuid, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]))


def _start(client: object, host: str, port: int) -> "TransferServer":
    try:
        from jax.experimental.transfer import start_transfer_server
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--transport jax: jax {jax.__version__} has no jax.experimental.transfer: {error}") from None
    sockets = [f"{host}:0"] * SOCKETS
    try:
        return start_transfer_server(
            client, f"{host}:{port}", sockets, max_num_parallel_copies=BUFFERS, transfer_size=BUFFER
        )
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--transport jax: {host}:{port}: {_line(error)}") from None


async def _ready(arrays: Sequence[jax.Array]) -> None:
    """Polled: a thread that waits in `block_until_ready` aborts the process at its end."""
    while not all(array.is_ready() for array in arrays):
        await asyncio.sleep(POLL)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
