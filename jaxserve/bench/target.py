"""The server that is measured: one that runs already, or one that is started."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.addresses import check_address
from jaxserve.bench.arrivals import Arrival
from jaxserve.bench.caller import Caller, Credentials
from jaxserve.bench.flags import ServerBenchOptions
from jaxserve.bench.grpc_caller import grpc_caller
from jaxserve.bench.openai_caller import OpenAICaller, find_model, http_client
from jaxserve.bench.own_server import HOST, free_ports, running, serve_command
from jaxserve.client import AsyncClient
from jaxserve.errors import AdminOnlyError, ConfigError, JaxserveError
from jaxserve.flag_errors import flag_error
from jaxserve.tokenizer import load_tokenizer

SECONDS = 30.0  # that a server gets to describe itself
URL = re.compile(r"(?P<scheme>grpc|https?)://(?P<host>[^/?#\s]+)(?P<path>/[^?#\s]*)?")


@dataclass(frozen=True)
class Compiles:
    """Compiles of a server since it is ready."""

    waited_for: int = 0  # by requests
    beside: int = 0  # requests


@dataclass(frozen=True)
class Target:
    """A server, and what is known about it."""

    protocol: str
    where: str  # HOST:PORT of gRPC, or the base of OpenAI's API
    model: str
    credentials: Credentials
    vocab_size: int | None = None  # None if it is not known
    not_drawn: tuple[int, ...] = ()  # tokens that random prompts leave out
    max_context: int | None = None  # None if it is not known
    # Device, versions and sizes, as far as the server reports them.
    about: dict[str, Any] | None = None

    @property
    def device(self) -> str:
        """Kind of the server's devices."""
        return (self.about or {}).get("device_kind", "device not told")

    def check_fits(self, arrivals: Sequence[Arrival]) -> None:
        """Raise ConfigError if a request is longer than the context."""
        if not self.max_context:
            return
        long = [a for a in arrivals if a.prompt_tokens + a.output_tokens > self.max_context]
        if long:
            raise ConfigError(
                f"{len(long)} of {len(arrivals)} requests do not fit the server's context of "
                f"{self.max_context} tokens, the first with {long[0].prompt_tokens} + "
                f"{long[0].output_tokens} (give --max-prompt-tokens and --max-output-tokens, or "
                f"--token-scale)"
            )

    def caller(
        self, options: ServerBenchOptions, requests: int, choices: int = 1
    ) -> AbstractAsyncContextManager[Caller]:
        """Connect to the server, for at most this many requests at a time.

        Args:
            choices: Answers that each request asks for.
        """
        if self.protocol == "openai":
            return _openai_caller(self, options, choices)
        ignore_eos = options.requests.ignore_eos
        return grpc_caller(self.where, requests, self.credentials, ignore_eos, choices)

    async def compiles(self) -> Compiles:
        """Return what the server has compiled since it is ready; zeros if it does not say."""
        if self.about is None or self.protocol != "grpc":
            return Compiles()
        async with _client(self.where, self.credentials) as client:
            info = await client.server_info()
            return Compiles(info.compiles_after_ready, info.background_compiles)


@asynccontextmanager
async def _openai_caller(
    target: Target, options: ServerBenchOptions, choices: int
) -> AsyncIterator[Caller]:
    async with http_client(target.where, target.credentials) as client:
        ignore_eos = options.requests.ignore_eos
        yield OpenAICaller(client, target.model, ignore_eos, options.server.strict, choices)


def address_of(url: str) -> tuple[str, str]:
    """Return protocol and place of --target; ConfigError if it is no such URL."""
    found = URL.fullmatch(url)
    if not found or (found["scheme"] == "grpc" and found["path"] not in (None, "/")):
        raise flag_error("--target", url, "it must be grpc://HOST:PORT or http://HOST:PORT/v1")
    if found["scheme"] == "grpc":
        check_address("--target", found["host"])
        return "grpc", found["host"]
    path = (found["path"] or "").rstrip("/") or "/v1"
    return "openai", f"{found['scheme']}://{found['host']}{path}/"


@asynccontextmanager
async def target(options: ServerBenchOptions, console: Console) -> AsyncIterator[Target]:
    """Yield the server of --target; without the flag, start one for the time of the block."""
    asked = options.server
    if asked.target:
        yield await _look(options, *address_of(asked.target))
        return
    port, http_port = free_ports(2)
    flags = [*(["--model", str(asked.model)] if asked.model else []), *asked.serve_flags]
    console.print(
        f"starting a server: {' '.join(flags) or 'the bundled model'}", soft_wrap=True, markup=False
    )
    command = serve_command(port, http_port, flags)
    async with running(command, f"{HOST}:{port}", asked.ready_timeout):
        yield await _look(options, "grpc", f"{HOST}:{port}")


async def _look(options: ServerBenchOptions, protocol: str, where: str) -> Target:
    """Ask a server what it is.

    Raises ConfigError if random prompts are needed and the vocabulary is not known.
    """
    asked = options.server
    credentials = Credentials(asked.credentials.token, asked.credentials.tls)
    if protocol == "openai":
        model = await find_model(where, credentials, asked.served_model_name)
        seen = Target(protocol, where, model.name, credentials, max_context=model.max_context)
    else:
        seen = await _ask_admin(options, where, credentials)
    if asked.vocab_size:
        return replace(seen, vocab_size=asked.vocab_size)
    if asked.tokenizer:
        return _with_tokenizer(seen, asked.tokenizer)
    if seen.vocab_size is None and not options.requests.prompts_file:
        raise ConfigError(
            f"{where} does not tell its vocabulary (give --tokenizer, --vocab-size or "
            f"--prompts-file)"
        )
    return seen


async def _ask_admin(options: ServerBenchOptions, where: str, credentials: Credentials) -> Target:
    """Ask a server's AdminService what it is.

    Raises JaxserveError if it does not answer, unless the flags say enough to go on without.
    """
    async with _client(where, credentials) as client:
        try:
            model = await client.model_info()
            server = await client.server_info()
        except JaxserveError as error:
            asked = options.server
            if asked.vocab_size or asked.tokenizer or options.requests.prompts_file:
                return Target("grpc", where, where, credentials)
            if isinstance(error, AdminOnlyError):
                raise ConfigError(
                    f"{where} tells only admins what it serves (give --vocab-size): {error}"
                ) from None
            raise
    about = asdict(server)
    del about["buckets"], about["uptime_seconds"]
    about |= {"model": model.name, "dtype": model.dtype, "max_context": model.max_context}
    return Target(
        protocol="grpc",
        where=where,
        model=model.name,
        credentials=credentials,
        vocab_size=model.vocab_size,
        not_drawn=model.eos_token_ids,
        max_context=model.max_context,
        about=about,
    )


def _with_tokenizer(seen: Target, folder: Path) -> Target:
    tokenizer = load_tokenizer(folder)
    ids = range(tokenizer.vocab_size)
    silent = (token for token in ids if not tokenizer.token_bytes(token)[0])  # special, and gaps
    added = tokenizer.added_tokens.values()  # perhaps beyond the ids of the server's model
    not_drawn = {*seen.not_drawn, *tokenizer.eos_ids, *silent, *added}
    return replace(seen, vocab_size=tokenizer.vocab_size, not_drawn=tuple(sorted(not_drawn)))


def _client(where: str, credentials: Credentials) -> AsyncClient:
    return AsyncClient(
        where, retries=0, timeout=SECONDS, token=credentials.token, tls=credentials.tls
    )
