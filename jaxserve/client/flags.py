"""Flags of jaxserve client."""

import argparse
from pathlib import Path

from jaxserve.addresses import server_problem
from jaxserve.cli.inputs import read_prompts
from jaxserve.cli.parser import Parser
from jaxserve.cli.sampling_flags import sampling_flags
from jaxserve.client.channel import TLS
from jaxserve.client.client import Client
from jaxserve.client.connection import ADDRESS
from jaxserve.errors import ConfigError, RequestError, flag_text
from jaxserve.request import SamplingParams

STANDARD_INPUT = "-"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    p = Parser(prog="jaxserve client", description="Ask a server of jaxserve for text.")
    p.add_argument(
        "prompt",
        nargs="?",
        default=STANDARD_INPUT,
        metavar="PROMPT",
        help="text to send; - or none reads standard input, without its last newline",
    )
    p.add_argument(
        "--chat",
        action="store_true",
        help="send the prompt as a user's message, which the chat template renders",
    )
    p.add_argument(
        "--system", metavar="TEXT", help="system message before the prompt (needs --chat)"
    )
    p.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, and nothing else on standard output",
    )
    p.add_argument(
        "--stats",
        action="store_true",
        help="print latencies as the client sees them, on standard error",
    )
    _server_flags(p.add_argument_group("server"))
    sampling_flags(p.add_argument_group("sampling"), of_server=True)
    return p


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--address",
        default=ADDRESS,
        metavar="HOST:PORT",
        help=f"address of the server's gRPC (default: {ADDRESS})",
    )
    credential_flags(group)
    group.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="seconds that the answer may take as a whole (default: any time)",
    )


def credential_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the token and of TLS."""
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that the server asks for",
    )
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="PEM file of the authorities that vouch for the server; turns TLS on",
    )
    group.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM file of the client's certificate"
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file of the client's key")


def token_of(args: argparse.Namespace) -> str | None:
    """Return the token in the file of --token-file; RequestError if it cannot be read."""
    path: Path | None = args.token_file
    try:
        return path.read_text("utf-8", "replace").strip() if path else None
    except OSError as error:
        raise RequestError("--token-file", f"{path}: {error.strerror}") from None


def tls_of(args: argparse.Namespace) -> TLS | None:
    """Return the TLS files that were given; None for a connection in plain text."""
    files = {"ca": args.tls_ca, "certificate": args.tls_cert, "key": args.tls_key}
    return TLS(**files) if any(files.values()) else None


def new_client(args: argparse.Namespace) -> Client:
    return Client(args.address, token=token_of(args), tls=tls_of(args), timeout=args.timeout)


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt that was given, or standard input."""
    given = [] if args.prompt == STANDARD_INPUT else [args.prompt]
    return read_prompts(given, None)[0]


def check_flags(args: argparse.Namespace, params: SamplingParams) -> None:
    """Raise ConfigError for a wrong address, RequestError for flags that do not go together."""
    if problem := server_problem(args.address):
        raise ConfigError(flag_text("--address", args.address, problem))
    if args.system is not None and not args.chat:
        raise RequestError("--system", "is for a conversation (add --chat)")
    if params.n > 1 and not args.json:
        raise RequestError(
            "--n", f"is {params.n}, and only one text can be shown as it comes (add --json)"
        )
