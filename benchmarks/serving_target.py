"""The server that benchmarks.serving measures: one that is there, or one of our own; and the way to it."""

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from benchmarks.arrivals import Arrival
from benchmarks.load_clients import Caller, Credentials, grpc_caller, openai_caller
from benchmarks.own_server import HOST, free_ports, running, serve_command
from jaxserve.client import AsyncClient
from jaxserve.client.flags import tls_of, token_of
from jaxserve.errors import AdminOnlyError, ConfigError

SECONDS = 30.0  # for a server to say what it is


@dataclass(frozen=True)
class Target:
    """address: of gRPC. max_context: tokens; None where nobody said.

    about: device, versions and sizes, as the server tells them; nothing when it was not asked.
    """

    name: str
    address: str
    url: str
    vocab_size: int
    end_ids: tuple[int, ...]
    max_context: int | None
    about: dict[str, Any]
    credentials: Credentials

    def check_fits(self, arrivals: Sequence[Arrival]) -> None:
        """ConfigError when a request is longer than the context."""
        long = [a for a in arrivals if self.max_context and a.prompt_tokens + a.output_tokens > self.max_context]
        if long:
            raise ConfigError(
                f"{len(long)} of {len(arrivals)} requests do not fit the server's context of {self.max_context} "
                f"tokens, the first with {long[0].prompt_tokens} + {long[0].output_tokens} (give --max-prompt-tokens "
                f"and --max-output-tokens, or --token-scale)"
            )

    async def compiles_after_ready(self) -> int:
        if not self.about:
            return 0
        async with _client(self.address, self.credentials) as client:
            return (await client.server_info()).compiles_after_ready


@asynccontextmanager
async def target(args: argparse.Namespace, preset: str, console: Console) -> AsyncIterator[Target]:
    """With a preset: a server of our own, for as long as the block runs."""
    if not preset:
        yield await _look(args, args.address, args.url)
        return
    port, http_port = free_ports(2)
    address, url = f"{HOST}:{port}", f"http://{HOST}:{http_port}"
    console.print(f"starting a server: --prefer {preset} {' '.join(args.serve_flags)}".rstrip(), soft_wrap=True)
    async with running(
        serve_command(port, http_port, ["--prefer", preset, *args.serve_flags]), address, args.ready_timeout
    ):
        yield replace(await _look(args, address, url), name=preset)


async def _look(args: argparse.Namespace, address: str, url: str) -> Target:
    """Ask a server what it is, unless --vocab-size says enough; CallError when there is none."""
    credentials = Credentials(token_of(args), tls_of(args))
    if args.vocab_size:
        name = url if args.protocol == "openai" else address
        return Target(name, address, url, args.vocab_size, (), None, {}, credentials)
    async with _client(address, credentials) as client:
        try:
            model, server = await client.model_info(), await client.server_info()
        except AdminOnlyError as error:
            raise ConfigError(f"{address} tells only admins what it serves (give --vocab-size): {error}") from None
    about = asdict(server)
    del about["buckets"], about["uptime_seconds"]
    about |= {"model": model.name, "dtype": model.dtype, "max_context": model.max_context}
    eos_ids, context = model.eos_token_ids, model.max_context
    return Target(model.name, address, url, model.vocab_size, eos_ids, context, about, credentials)


def _client(address: str, credentials: Credentials) -> AsyncClient:
    return AsyncClient(address, retries=0, timeout=SECONDS, token=credentials.token, tls=credentials.tls)


def caller_of(protocol: str, server: Target, requests: int) -> AbstractAsyncContextManager[Caller]:
    if protocol == "openai":
        return openai_caller(server.url, server.credentials)
    return grpc_caller(server.address, requests, server.credentials)
