"""The flags of roles, and what they say."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.server.disaggregation.addresses import check_address, read_addresses
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.security.files import read_file, read_token

ROLES = ("both", "prefill", "decode")
MEBI = 2**20


def role_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill-mesh",
        type=int,
        metavar="N",
        help="with --decode-mesh: long prompts are computed on a mesh of their own, the first N "
        "devices, which share "
        "the heads out",
    )
    group.add_argument(
        "--decode-mesh",
        type=int,
        metavar="N",
        help="everything else on the next N devices, which have the weights as well",
    )
    group.add_argument(
        "--role",
        choices=ROLES,
        default="both",
        help="prefill: compute prompts for decode servers only; decode: hand long prompts over "
        "to prefill servers; "
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
        "--prefill-servers-file",
        type=Path,
        metavar="F",
        help="the same, one per line; read again when it changes",
    )
    group.add_argument(
        "--prefill-threshold",
        type=int,
        default=512,
        metavar="N",
        help="a prompt with so many tokens or more that are not cached here is handed over (512)",
    )
    group.add_argument(
        "--prefill-queue-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="it is not while more tokens wait at every prefill server (32768)",
    )
    group.add_argument(
        "--prefill-token-file", type=Path, metavar="F", help="the token that prefill servers want"
    )
    group.add_argument(
        "--prefill-tls-ca",
        type=Path,
        metavar="F",
        help="PEM: prefill servers need a certificate of this CA; --tls-cert is shown to them",
    )
    group.add_argument(
        "--transfer-buffer",
        type=int,
        default=2048,
        metavar="MIB",
        help="of pages that come or leave, at most (2048)",
    )
    group.add_argument(
        "--transfer-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="for a prompt's trip, or for pages on offer; then it is computed here (60)",
    )


@dataclass(frozen=True)
class Meshes:
    """Of --prefill-mesh and --decode-mesh: sizes of their tensor axes. seconds: of a trip."""

    prefill: int
    decode: int
    policy: Policy
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Settings of --role prefill and decode.

    buffer: bytes. seconds: of a trip. token: for prefill servers. ca, certificate, key: PEM, for
    calls to prefill servers; without ca there is no TLS.
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
    """None for --role both. ConfigError for flags that do not go together, and for files that
    cannot be read.
    """
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
        policy=_policy(args),
        buffer=args.transfer_buffer * MEBI,
        seconds=args.transfer_timeout,
        token=read_token(args.prefill_token_file, "--prefill-token-file"),
        ca=read_file(args.prefill_tls_ca, "--prefill-tls-ca") if args.prefill_tls_ca else None,
        certificate=read_file(args.tls_cert, "--tls-cert") if shows else None,
        key=read_file(args.tls_key, "--tls-key") if shows else None,
    )


def meshes(args: argparse.Namespace) -> Meshes | None:
    """None where one mesh does it all. ConfigError for flags that do not go together."""
    sizes = {"--prefill-mesh": args.prefill_mesh, "--decode-mesh": args.decode_mesh}
    if all(size is None for size in sizes.values()):
        return None
    if None in sizes.values():
        raise ConfigError("--prefill-mesh and --decode-mesh go together: give both")
    for flag, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{flag} {size}: it must be at least 1")
    _check_alone(args)
    return Meshes(args.prefill_mesh, args.decode_mesh, _policy(args), args.transfer_timeout)


def _check_alone(args: argparse.Namespace) -> None:
    """Beside --prefill-mesh and --decode-mesh."""
    both = "--prefill-mesh and --decode-mesh"
    if args.role != "both":
        raise ConfigError(
            f"--role {args.role}: with {both} this server does both (leave one of them out)"
        )
    for axis in ("data", "expert", "tensor"):
        if (size := getattr(args, axis)) != 1:
            raise ConfigError(
                f"--{axis} {size}: {both} say how many devices share the heads (leave it out)"
            )
    for flag in ("hosts", "pod", "bundle"):
        if getattr(args, flag):
            raise ConfigError(
                f"--{flag}: {both} are not built in together with it (leave one of them out)"
            )


def _policy(args: argparse.Namespace) -> Policy:
    return Policy(args.prefill_threshold, args.prefill_queue_tokens)


def _check(args: argparse.Namespace) -> None:
    for flag in ("prefill_server", "prefill_servers_file", "prefill_token_file", "prefill_tls_ca"):
        if getattr(args, flag) and args.role != "decode":
            raise ConfigError(
                f"--{flag.replace('_', '-')} is for --role decode (this is --role {args.role})"
            )
    if args.role == "decode" and not (args.prefill_server or args.prefill_servers_file):
        raise ConfigError(
            "--role decode: no server computes its prompts (--prefill-server or "
            "--prefill-servers-file)"
        )
    for flag, least in (
        ("prefill_threshold", 1),
        ("prefill_queue_tokens", 0),
        ("transfer_buffer", 1),
    ):
        if getattr(args, flag) < least:
            raise ConfigError(
                f"--{flag.replace('_', '-')} {getattr(args, flag)}: it must be at least {least}"
            )
    if not 0 < args.transfer_timeout < math.inf:
        raise ConfigError(
            f"--transfer-timeout {args.transfer_timeout:g}: it must be above 0, and a number"
        )
