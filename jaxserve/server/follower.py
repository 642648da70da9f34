"""A server's process on a host that follows: no requests, but a health check, and signals."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jaxserve.errors import ConfigError


@contextmanager
def healthy(host: str, port: int) -> Iterator[None]:
    """Answer "does this process live" over gRPC, without TLS, for as long as this lasts: probes ask
    it.
    """
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(f"--port {port}: cannot listen on {address} (is it taken?)") from None
    server.start()
    yield
    server.stop(0)


def on_signals(leave: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT tells the leader, which drains and ends the pod; the second ends
    this process.
    """
    told = iter((leave,))

    def act(number: int, _: object) -> None:
        for tell in told:
            return tell()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, act)
