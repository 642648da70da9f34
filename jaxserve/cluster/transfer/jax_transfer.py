"""jax.experimental.transfer: arrays are offered in one process and pulled in another, through sockets of its own.

The arrays are the CPU backend's, which lie in the host's memory, on hosts of GPUs and TPUs as well: pieces are read
from the devices before, and uploaded after, by the engines. What has to be known of it, in jax 0.11.2 and 0.12.0.1:

- Nothing of it can be ended. A pull waits for ever where nobody offers its arrays or nobody is there, and does not mind
  a timeout. An offer stays in memory until it is pulled, or another one takes its number. Where the other process
  ends, a pull fails at once.
- Whatever one process sends goes through the same few buffers. A receiver that stops in the midst of a pull, its
  connections open, holds back all the others until it goes on or ends.
- There is no encryption and no token but the number of an offer, and some messages that are not of its protocol abort
  the process, as does a port of the other side that is closed or cut off while they connect. It is for a network that
  these servers have for themselves.
- A host's name is taken for 0.0.0.0, so hosts are numbers.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

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
LATE = 60.0  # seconds that an offer may be over when it is pulled


class JaxTransfer:
    """This process's end, which offers and pulls. address: HOST:PORT, where others find it.

    Arrays are put and pulled within an event loop's thread. Nothing of it is compiled.
    """

    def __init__(self, host: str, port: int = 0):
        """host: the number by which others reach this one; 127.0.0.1 will do for one that pulls only.

        ConfigError where it is none of this machine's, or where jax has no such part or no CPU backend.
        """
        if not _reachable(host):
            raise ConfigError(
                f"--transport jax: {host!r} is no number by which other servers reach this one (--transfer-host)"
            )
        self._device = _cpu()
        self._sharding = SingleDeviceSharding(self._device)
        self._server = _start(self._device.client, host, port)
        self.address = self._server.address()
        self._connections: dict[str, TransferConnection] = {}
        self._byte: jax.Array = jax.device_put(np.zeros(1, np.int8), self._device)
        self._over: deque[tuple[float, int]] = deque()  # when, and the offer's number

    async def put(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        """As it takes them. Copied where they do not begin at a multiple of 64 bytes."""
        return await asyncio.to_thread(jax.device_put, list(arrays), self._device)

    def offer(self, arrays: Sequence[jax.Array]) -> list[int]:
        """The random numbers under which each may be pulled, once. TransferError DATA_LOSS where one is empty."""
        _check_full(arrays)
        uuids = [secrets.randbits(63) for _ in arrays]
        for uuid, array in zip(uuids, arrays, strict=True):
            self._server.await_pull(uuid, [array])
        return uuids

    def connect(self, address: str) -> "TransferConnection":
        """One for all, whether somebody is there or not. TransferError DATA_LOSS for what is no `address`."""
        if address not in self._connections:
            self._connections[address] = self._connect(address)
        return self._connections[address]

    def disconnect(self, address: str) -> None:
        """Once a pull has failed: the connection is of no use any more."""
        self._connections.pop(address, None)

    def _connect(self, address: str) -> "TransferConnection":
        host, _, port = address.rpartition(":")
        if not (_reachable(host.strip("[]")) and port.isdecimal() and 0 < int(port) < 2**16):
            raise TransferError("DATA_LOSS", f"{address!r:.60} is no address of jax.experimental.transfer")
        return self._server.connect(address)

    async def pull(
        self, connection: "TransferConnection", uuids: Sequence[int], arrays: Sequence[Array]
    ) -> list[np.ndarray]:
        """Wait for them, if need be for ever: what has been asked for comes even if nobody waits for it any more.

        TransferError UNAVAILABLE when the other side ends before, or has another array under a number; DATA_LOSS for
        an empty one, or where there are not as many numbers.
        """
        _check_full(arrays)
        if len(uuids) != len(arrays):
            raise TransferError("DATA_LOSS", f"{len(uuids)} arrays are offered, of {len(arrays)}")
        pulled = [self._ask(connection, uuid, array) for uuid, array in zip(uuids, arrays, strict=True)]
        await _ready(pulled)
        try:
            return [np.asarray(array) for array in pulled]
        except jax.errors.JaxRuntimeError as error:
            raise TransferError("UNAVAILABLE", f"jax.experimental.transfer: {_line(error)}", remote=True) from None

    async def drain(self, uuids: Sequence[int]) -> None:
        """Offers that are over, whatever of them was pulled: wait until this process holds and sends nothing of them.

        A byte is offered in their place, so that who pulls too late fails, instead of waiting for ever. All that is
        sent goes out in order: once a byte that is offered here and now is pulled, what was pulled before is gone.
        """
        now, itself = asyncio.get_running_loop().time(), self._connect(self.address)
        for uuid in uuids:
            self._server.await_pull(uuid, [self._byte])
            self._over.append((now, uuid))
        await self._pull_here(itself, secrets.randbits(63))
        while self._over and self._over[0][0] <= now - LATE:
            await self._pull_here(itself, self._over.popleft()[1])

    async def _pull_here(self, itself: "TransferConnection", uuid: int) -> None:
        """Nothing is left under this number. Offered anew, since a pull of what was pulled would wait for ever."""
        self._server.await_pull(uuid, [self._byte])
        await _ready([self._ask(itself, uuid, self._byte)])

    def _ask(self, connection: "TransferConnection", uuid: int, array: Array | jax.Array) -> jax.Array:
        (pulled,) = connection.pull(uuid, [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._sharding)])
        return pulled


def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(f"--transport jax: jax has no CPU backend (JAX_PLATFORMS): {_line(error)}") from None


def _start(client: Any, host: str, port: int) -> "TransferServer":
    try:
        from jax.experimental.transfer import start_transfer_server
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--transport jax: jax {jax.__version__} has no jax.experimental.transfer: {error}") from None
    host = f"[{host}]" if ":" in host else host
    sockets, sizes = [f"{host}:0"] * SOCKETS, {"max_num_parallel_copies": BUFFERS, "transfer_size": BUFFER}
    try:
        return start_transfer_server(client, f"{host}:{port}", sockets, **sizes)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--transport jax: {host}:{port}: {_line(error)}") from None


def _reachable(host: str) -> bool:
    try:
        return not ip_address(host).is_unspecified
    except ValueError:
        return False


def _check_full(arrays: Sequence[Array | jax.Array]) -> None:
    if not all(array.nbytes for array in arrays):
        raise TransferError("DATA_LOSS", "an array without numbers never comes (jax.experimental.transfer)")


async def _ready(arrays: Sequence[jax.Array]) -> None:
    """Polled: a thread that waits in `block_until_ready` aborts the process at its end."""
    while not all(array.is_ready() for array in arrays):  # type: ignore[attr-defined]
        await asyncio.sleep(POLL)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
