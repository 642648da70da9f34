"""Flags of jaxserve client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.addresses import server_problem
from jaxserve.chat import TemplateOptions
from jaxserve.cli.field_flags import add_flags, options_from
from jaxserve.cli.inputs import read_prompts
from jaxserve.cli.parser import Parser
from jaxserve.cli.template_flags import template_fields
from jaxserve.client.channel import TLS
from jaxserve.client.client import Client
from jaxserve.client.connection import ADDRESS
from jaxserve.client.messages import OF_THE_MODEL
from jaxserve.config.option import given_options, option, options
from jaxserve.errors import RequestError
from jaxserve.flag_errors import flag_error
from jaxserve.sampling_params import SamplingParams

STANDARD_INPUT = "-"


@dataclass(frozen=True, kw_only=True)
class CredentialOptions:
    """Files with the token of a server, and for TLS."""

    token_file: Path | None = option(
        None, "file with the token that the server asks for", metavar="FILE"
    )
    tls_ca: Path | None = option(
        None, "PEM file of the authorities that vouch for the server; turns TLS on", metavar="FILE"
    )
    tls_cert: Path | None = option(None, "PEM file of the client's certificate", metavar="FILE")
    tls_key: Path | None = option(None, "PEM file of the client's key", metavar="FILE")

    @property
    def token(self) -> str | None:
        """Token in the file of --token-file; RequestError if it cannot be read."""
        path = self.token_file
        try:
            return path.read_text("utf-8", "replace").strip() if path else None
        except OSError as error:
            problem = f"is {path}; it cannot be read: {error.strerror}"
            raise RequestError("--token-file", problem) from None

    @property
    def tls(self) -> TLS | None:
        """TLS files that were given; None for a connection in plain text."""
        if not (self.tls_ca or self.tls_cert or self.tls_key):
            return None
        return TLS(ca=self.tls_ca, certificate=self.tls_cert, key=self.tls_key)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server, and how it is asked."""

    address: str = option(
        ADDRESS, f"address of the server's gRPC (default: {ADDRESS})", metavar="HOST:PORT"
    )
    credentials: CredentialOptions = options(CredentialOptions)
    timeout: float | None = option(
        None, "seconds that the answer may take as a whole (default: any time)", metavar="SECONDS"
    )


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of `jaxserve client`."""

    prompt: str = option(
        STANDARD_INPUT,
        "text to send; - or none reads standard input, without its last newline",
        metavar="PROMPT",
        names=("prompt",),
        nargs="?",
    )
    chat: bool = option(
        False, "send the prompt as a user's message, which the chat template renders"
    )
    system: str | None = option(
        None, "system message before the prompt (needs --chat)", metavar="TEXT"
    )
    json: bool = option(False, "print one JSON object, and nothing else on standard output")
    stats: bool = option(False, "print latencies as the client sees them, on standard error")
    server: ServerOptions = options(ServerOptions, "server")
    template: Mapping[str, Any] = given_options(TemplateOptions, "conversation")
    sampling: Mapping[str, Any] = given_options(SamplingParams, "sampling")


def parser() -> Parser:
    """Return the parser of the program."""
    p = Parser(prog="jaxserve client", description="Ask a server of jaxserve for text.")
    add_flags(p, ClientOptions)
    for action in p._actions:
        if action.dest in OF_THE_MODEL:
            text = str(action.help).removesuffix(")")
            action.help = f"{text}, unless the server's model has another)"
    return p


def parse(arguments: Sequence[str] | None = None) -> ClientOptions:
    """Return the options of a command line, by default that of this process."""
    return options_from(ClientOptions, parser().parse_args(arguments))


def new_client(server: ServerOptions) -> Client:
    credentials = server.credentials
    return Client(
        server.address, token=credentials.token, tls=credentials.tls, timeout=server.timeout
    )


def read_prompt(options: ClientOptions) -> str:
    """Return the prompt that was given, or standard input."""
    given = [] if options.prompt == STANDARD_INPUT else [options.prompt]
    return read_prompts(given, None)[0]


def check_flags(options: ClientOptions, params: SamplingParams) -> None:
    """Raise ConfigError for a wrong address, RequestError for flags that do not go together."""
    address = options.server.address
    if problem := server_problem(address):
        raise flag_error("--address", address, problem)
    if options.system is not None and not options.chat:
        raise RequestError("--system", "is for a conversation (add --chat)")
    template_fields(options.template, options.chat)
    if params.n > 1 and not options.json:
        raise RequestError(
            "--n", f"is {params.n}, and only one text can be shown as it comes (add --json)"
        )
