"""The flags of roles, and what they say."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.server.disaggregation.addresses import check_address, read_addresses
from jaxserve.server.disaggregation.decision import Policy
from jaxserve.server.files import read_file, read_token

ROLES = ("both", "prefill", "decode")
MEBI = 2**20


def role_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--role",
        choices=ROLES,
        default="both",
        help="prefill: compute prompts for decode servers only; decode: hand long prompts over to prefill servers; "
        "both: neither (default)",
    )
    group.add_argument(
        "--prefill-server",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="gRPC of a prefill server; may be given several times",
    )
    group.add_argument(
        "--prefill-servers-file", type=Path, metavar="F", help="the same, one per line; read again when it changes"
    )
    group.add_argument(
        "--prefill-threshold",
        type=int,
        default=512,
        metavar="N",
        help="a prompt with so many tokens that are not cached here is handed over (512)",
    )
    group.add_argument(
        "--prefill-queue-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="it is not while more tokens wait at every prefill server (32768)",
    )
    group.add_argument("--prefill-token-file", type=Path, metavar="F", help="the token that prefill servers want")
    group.add_argument(
        "--prefill-tls-ca",
        type=Path,
        metavar="F",
        help="PEM: prefill servers need a certificate of this CA; --tls-cert is shown to them",
    )
    group.add_argument(
        "--transfer-buffer", type=int, default=2048, metavar="MIB", help="of pages that come or leave, at most (2048)"
    )
    group.add_argument(
        "--transfer-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="for a prompt's trip, or for pages on offer; then it is computed here (60)",
    )


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Of --role prefill and decode. buffer: bytes. seconds: of a trip. token: for prefill servers.

    ca, certificate, key: PEM, for calls to prefill servers; without ca there is no TLS.
    """

    role: str
    servers: tuple[str, ...]
    servers_file: Path | None
    policy: Policy
    buffer: int
    seconds: float
    token: str | None = None
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    @property
    def prefills(self) -> bool:
        return self.role == "prefill"


def disaggregation(args: argparse.Namespace) -> Disaggregation | None:
    """None for --role both. ConfigError for flags that do not go together, and for files that cannot be read."""
    _check(args)
    if args.role == "both":
        return None
    if args.prefill_servers_file:
        read_addresses(args.prefill_servers_file)
    shows = args.prefill_tls_ca and args.tls_cert and args.tls_key
    return Disaggregation(
        role=args.role,
        servers=tuple(map(check_address, args.prefill_server)),
        servers_file=args.prefill_servers_file,
        policy=Policy(args.prefill_threshold, args.prefill_queue_tokens),
        buffer=args.transfer_buffer * MEBI,
        seconds=args.transfer_timeout,
        token=read_token(args.prefill_token_file, "--prefill-token-file"),
        ca=read_file(args.prefill_tls_ca, "--prefill-tls-ca") if args.prefill_tls_ca else None,
        certificate=read_file(args.tls_cert, "--tls-cert") if shows else None,
        key=read_file(args.tls_key, "--tls-key") if shows else None,
    )


def _check(args: argparse.Namespace) -> None:
    for flag in ("prefill_server", "prefill_servers_file", "prefill_token_file", "prefill_tls_ca"):
        if getattr(args, flag) and args.role != "decode":
            raise ConfigError(f"--{flag.replace('_', '-')} is for --role decode (this is --role {args.role})")
    if args.role == "decode" and not (args.prefill_server or args.prefill_servers_file):
        raise ConfigError("--role decode: no server computes its prompts (--prefill-server or --prefill-servers-file)")
    for flag, least in (("prefill_threshold", 1), ("prefill_queue_tokens", 0), ("transfer_buffer", 1)):
        if getattr(args, flag) < least:
            raise ConfigError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: it must be at least {least}")
    if not 0 < args.transfer_timeout < math.inf:
        raise ConfigError(f"--transfer-timeout {args.transfer_timeout:g}: it must be above 0, and a number")
