"""Servers over fake devices: a decode server, its prefill servers, and the network between."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.loading.digests import WeightDigests
from jaxserve.server.core.limits import Limits
from jaxserve.server.disaggregation.flags import Disaggregation
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.disaggregation.prefill_pool import State
from jaxserve.server.disaggregation.roles import DecodeRole, PrefillRole
from jaxserve.server.readiness import Readiness
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.cluster.transfer.harness import Proxy
from tests.jaxserve.server.harness import Running, running, until

HANDSHAKE = Handshake({"the model": "fake"}, WeightDigests(), "float32", ("float32",))
MEBI = 2**20
PAGE = 4  # tokens
LONG = (
    "a prompt of so many letters that it is worth a trip to another server, and to stay there a "
    "while " * 2
)
PLAN = Disaggregation(
    role="decode",
    servers=(),
    servers_file=None,
    policy=Policy(64, 4096),
    buffer=64 * MEBI,
    seconds=600.0,
)


def reachable(tokens: int) -> int:
    """Return how many tokens of a prompt whole pages can hold, without its last token."""
    return (tokens - 1) // PAGE * PAGE


@dataclass
class Apart:
    """A decode server, and the prefill servers that it reaches through proxies."""

    decode: Running
    role: DecodeRole
    registry: CollectorRegistry
    prefills: list[Running]
    prefill_roles: list[PrefillRole]
    prefill_registries: list[CollectorRegistry]
    proxies: list[Proxy]

    def count(self, name: str, **labels: str) -> float:
        """Return a metric of the decode server."""
        return self.registry.get_sample_value(f"jaxserve:disaggregation_{name}", labels) or 0.0

    def decisions(self, decision: str) -> float:
        return self.count("decisions_total", decision=decision)

    @property
    def failures(self) -> dict[str, int]:
        """Numbers of prompts that were computed here after a failure, by the reason."""
        return {
            sample.labels["reason"]: int(sample.value)
            for metric in self.registry.collect()
            if metric.name == "jaxserve:disaggregation_failures"
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    @property
    def states(self) -> dict[str, int]:
        return {str(state): count for state, count in self.role._pool.states.items()}

    async def until(self, state: State, count: int = 1) -> None:
        """Wait until this number of prefill servers is in the state."""
        await until(lambda: self.states.get(str(state), 0) == count)

    async def at_rest(self) -> None:
        """Wait until nothing runs, and nothing is held on either side."""
        await self.decode.at_rest()
        await until(lambda: not (self.role._budget.held or self.role._budget.waiting))
        for server, role in zip(self.prefills, self.prefill_roles, strict=True):
            if not server.failures:
                await server.at_rest()
                transfers = server.engine.transfers
                await until(lambda: not transfers._exports)  # noqa: B023
            await until(lambda: not role.offers.budget.held)  # noqa: B023
            role.offers.check_invariants()
        for server in (self.decode, *self.prefills):
            room: Any = server.engine.transfers.slots
            await until(lambda: room._value == room._initial_value)  # noqa: B023


@asynccontextmanager
async def apart(
    folder: Path,
    *,
    prefills: int = 1,
    handshake: Handshake = HANDSHAKE,
    plan: Disaggregation = PLAN,
    prefill_seconds: float = 0.0,
    prefill_options: Mapping[str, Any] = MappingProxyType({}),
    decode_limits: Limits | None = None,
    ready: bool = True,
    **config: Any,
) -> AsyncIterator[Apart]:
    """A decode server and its prefill servers, each behind a proxy.

    handshake: of the prefill servers. plan: of the decode server. prefill_seconds: of one of their
    steps. prefill_options: of their engines, which have those of the decode server (config)
    otherwise. ready: wait until they all are, as the decode server sees it.
    """
    async with AsyncExitStack() as stack:
        options = {"seconds": prefill_seconds, **config, **prefill_options}
        prefill_servers = [
            await stack.enter_async_context(
                prefill_server(folder / f"prefill{number}", plan, handshake, options)
            )
            for number in range(prefills)
        ]
        addresses = tuple(f"127.0.0.1:{prefill.proxy.port}" for prefill in prefill_servers)
        registry = CollectorRegistry()
        role = DecodeRole(replace(plan, servers=(*plan.servers, *addresses)), registry)
        own = folder / "decode"
        own.mkdir()
        options = {"new_role": lambda readiness: role, "limits": decode_limits, **config}
        decode = await stack.enter_async_context(running(own, handshake=HANDSHAKE, **options))
        servers = Apart(
            decode,
            role,
            registry,
            [prefill.server for prefill in prefill_servers],
            [prefill.role for prefill in prefill_servers],
            [prefill.registry for prefill in prefill_servers],
            [prefill.proxy for prefill in prefill_servers],
        )
        if ready:
            await servers.until(State.READY, prefills)
        yield servers


class PrefillServer(NamedTuple):
    """A prefill server, and the proxy that the decode server reaches it through."""

    server: Running
    role: PrefillRole
    registry: CollectorRegistry
    proxy: Proxy


@asynccontextmanager
async def prefill_server(
    folder: Path, plan: Disaggregation, handshake: Handshake, options: Mapping[str, Any]
) -> AsyncIterator[PrefillServer]:
    """A prefill server behind a proxy. folder: is made. plan: of the decode server."""
    registry = CollectorRegistry()
    roles = list[PrefillRole]()

    def new_role(readiness: Readiness) -> PrefillRole:
        roles.append(PrefillRole(replace(plan, role="prefill"), readiness, registry))
        return roles[-1]

    folder.mkdir()
    async with running(folder, new_role=new_role, handshake=handshake, **options) as server:
        port = int(server.address.split(":")[1])
        async with Proxy.before(port) as proxy:
            yield PrefillServer(server, roles[-1], registry, proxy)


def asking(text: str = LONG, **fields: Any) -> inference_pb2.GenerateRequest:
    sampling = {"seed": 1, "max_tokens": 12, "ignore_eos": True} | fields.pop("sampling", {})
    return inference_pb2.GenerateRequest(
        text=text, sampling=common_pb2.SamplingParams(**sampling), **fields
    )


async def plain(
    folder: Path, *requests: inference_pb2.GenerateRequest, **config: Any
) -> list[list[int]]:
    """Return the token ids of first choices from a server that computes its own prompts."""
    own = folder / "plain"
    own.mkdir(exist_ok=True)
    async with running(own, **config) as server:
        return [tokens_of(await server.inference.Generate(request)) for request in requests]


def tokens_of(response: inference_pb2.GenerateResponse) -> list[int]:
    return list(response.choices[0].token_ids)
