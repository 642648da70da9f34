"""Servers that actions talk to, and the type of an action."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from benchmarks.soak.outcomes import Outcomes
from jaxserve.client import AsyncClient

TIMEOUT = 300.0  # seconds for any answer: one that never comes is an unexpected one


@dataclass(frozen=True)
class Target:
    """One server as one coroutine sees it.

    Attributes:
        grpc: A channel that all coroutines share.
        http: Connections of this coroutine alone.
        address: gRPC's, HOST:PORT, for channels of one's own.
    """

    grpc: AsyncClient
    http: httpx.AsyncClient
    address: str
    outcomes: Outcomes


Action = Callable[[Target, random.Random], Awaitable[None]]


def connections(url: str) -> httpx.AsyncClient:
    """Return a client of HTTP with connections of its own."""
    # Without certificates, which take longer to load than a request takes, and without proxies.
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT, verify=False, trust_env=False)
