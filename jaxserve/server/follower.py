"""The process of a host that follows: a health check and signals, but no requests."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jaxserve.addresses import joined
from jaxserve.flag_errors import flag_error
from jaxserve.sigint import INTERRUPTED


@contextmanager
def serving_health(host: str, port: int) -> Iterator[None]:
    """Answer liveness probes over gRPC, without TLS, while the block runs."""
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = joined(host, port)
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise flag_error(
            "--port", port, f"nothing can listen on {address} (is it taken?)"
        ) from None
    server.start()
    yield
    server.stop(0)


class LeavesOnSignals:
    """Calls `leave` at the first SIGTERM or SIGINT, and ends the process at the second.

    Args:
        leave: Function that tells the leader, which drains and ends the pod.
    """

    def __init__(self, leave: Callable[[], None]):
        self._leave = leave
        self._first: int | None = None  # the signal that came
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._act)

    def _act(self, number: int, _: object) -> None:
        if self._first is not None:
            os._exit(128 + number)
        self._first = number  # before the call: the second signal may come during it
        self._leave()

    def exit_code(self, code: int) -> int:
        """Return the exit code of a process whose pod has ended with a code."""
        return INTERRUPTED if code == 0 and self._first == signal.SIGINT else code
