"""Flags of servers that compute prompts and decode apart, and what they ask for."""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.addresses import server_problem
from jaxserve.cli.field_flags import add_flags
from jaxserve.config.option import UNBOUNDED, check_bounds, flag, flag_of, options_of
from jaxserve.errors import ConfigError, flag_text
from jaxserve.server.disaggregation.addresses import read_addresses
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.security.files import read_certificates, read_file, read_token

ROLES = ("both", "prefill", "decode")
MEBI = 2**20


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """Flags of --role, and of two meshes in one server, as the operator gives them."""

    prefill_mesh: int | None = field(
        default=None,
        metadata=flag(
            "compute long prompts on a mesh of their own: the first N devices, which share the "
            "heads (needs --decode-mesh)",
            metavar="N",
            bounds=(1, UNBOUNDED),
        ),
    )
    decode_mesh: int | None = field(
        default=None,
        metadata=flag(
            "do everything else on the next N devices, which hold the weights as well (needs "
            "--prefill-mesh)",
            metavar="N",
            bounds=(1, UNBOUNDED),
        ),
    )
    role: str = field(
        default="both",
        metadata=flag(
            "prefill computes prompts for decode servers only, decode hands long prompts over to "
            "prefill servers, both does neither (default: both)",
            choices=ROLES,
        ),
    )
    prefill_server: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "address of a prefill server's gRPC; may be given several times", metavar="HOST:PORT"
        ),
    )
    prefill_servers_file: Path | None = field(
        default=None,
        metadata=flag(
            "file with addresses of prefill servers, one per line; read again when it changes",
            metavar="F",
        ),
    )
    prefill_threshold: int = field(
        default=512,
        metadata=flag(
            "hand a prompt over if at least N of its tokens are not cached here (default: 512)",
            metavar="N",
            bounds=(1, UNBOUNDED),
        ),
    )
    prefill_queue_tokens: int = field(
        default=32768,
        metadata=flag(
            "compute a prompt here while every prefill server has more than N tokens waiting "
            "(default: 32768)",
            metavar="N",
            bounds=(0, UNBOUNDED),
        ),
    )
    prefill_token_file: Path | None = field(
        default=None, metadata=flag("file with the token that prefill servers ask for", metavar="F")
    )
    prefill_tls_ca: Path | None = field(
        default=None,
        metadata=flag(
            "PEM file of the authority that vouches for prefill servers; turns TLS on, and "
            "--tls-cert is shown to them (default: plain text)",
            metavar="F",
        ),
    )
    transfer_buffer: int = field(
        default=2048,
        metadata=flag(
            "most memory in MiB for pages that are offered or fetched (default: 2048)",
            metavar="MIB",
            bounds=(1, UNBOUNDED),
        ),
    )
    transfer_timeout: float = field(
        default=60.0,
        metadata=flag(
            "seconds for the trip of a prompt, or for pages on offer; after that the prompt is "
            "computed here (default: 60)",
            metavar="S",
        ),
    )


def role_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of RoleOptions."""
    add_flags(group, RoleOptions)


@dataclass(frozen=True)
class Meshes:
    """Sizes of the two meshes of --prefill-mesh and --decode-mesh, in devices.

    seconds: time for the trip of a prompt from one to the other.
    """

    prefill: int
    decode: int
    policy: Policy
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Settings of --role prefill and --role decode.

    buffer: bytes. seconds: time for the trip of a prompt. token: sent to prefill servers. ca,
    certificate, key: PEM, for calls to prefill servers; without ca there is no TLS.
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
        """True for a server that computes prompts for decode servers."""
        return self.role == "prefill"


def disaggregation(args: argparse.Namespace) -> Disaggregation | None:
    """Return the settings of the role; None for --role both.

    Raises ConfigError for flags that do not go together, and for files that cannot be read.
    """
    check_role(args)
    if args.role == "both":
        return None
    if args.prefill_servers_file:
        read_addresses(args.prefill_servers_file)
    shows_certificate = args.prefill_tls_ca and args.tls_cert and args.tls_key
    return Disaggregation(
        role=args.role,
        servers=tuple(args.prefill_server),
        servers_file=args.prefill_servers_file,
        policy=_policy(args),
        buffer=args.transfer_buffer * MEBI,
        seconds=args.transfer_timeout,
        token=read_token(args.prefill_token_file, "--prefill-token-file"),
        ca=read_certificates(args.prefill_tls_ca, "--prefill-tls-ca"),
        certificate=read_file(args.tls_cert, "--tls-cert") if shows_certificate else None,
        key=read_file(args.tls_key, "--tls-key") if shows_certificate else None,
    )


def meshes(args: argparse.Namespace) -> Meshes | None:
    """Return the two meshes of one server; None where a single mesh does everything.

    Raises ConfigError for flags that do not go together.
    """
    given = [size is not None for size in (args.prefill_mesh, args.decode_mesh)]
    if not any(given):
        return None
    if not all(given):
        raise ConfigError("--prefill-mesh and --decode-mesh go together (give both)")
    _check_bounds(args)
    _check_alone(args)
    return Meshes(args.prefill_mesh, args.decode_mesh, _policy(args), args.transfer_timeout)


def _check_alone(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict --prefill-mesh and --decode-mesh."""
    both = "--prefill-mesh and --decode-mesh"
    if args.role != "both":
        raise ConfigError(
            flag_text(
                "--role",
                args.role,
                f"with {both} this server does both (leave one of them out)",
            )
        )
    for axis in ("data", "expert", "tensor"):
        if (size := getattr(args, axis)) != 1:
            raise ConfigError(
                flag_text(
                    f"--{axis}",
                    size,
                    f"{both} say how many devices share the heads (leave it out)",
                )
            )
    for name in ("hosts", "pod", "bundle"):
        if getattr(args, name):
            raise ConfigError(
                f"--{name} is not built in together with {both} (leave one of them out)"
            )


def _policy(args: argparse.Namespace) -> Policy:
    return Policy(args.prefill_threshold, args.prefill_queue_tokens)


def check_role(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not go with --role, or are out of bounds."""
    for name in ("prefill_server", "prefill_servers_file", "prefill_token_file", "prefill_tls_ca"):
        if getattr(args, name) and args.role != "decode":
            raise ConfigError(f"{flag_of(name)} is for --role decode (this is --role {args.role})")
    if args.role == "decode" and not (args.prefill_server or args.prefill_servers_file):
        raise ConfigError(
            flag_text(
                "--role",
                "decode",
                "no server computes its prompts (give --prefill-server or --prefill-servers-file)",
            )
        )
    for address in args.prefill_server:
        if problem := server_problem(address):
            raise ConfigError(flag_text("--prefill-server", address, problem))
    _check_bounds(args)


def _check_bounds(args: argparse.Namespace) -> None:
    for option in options_of(RoleOptions):
        value = getattr(args, option.name)
        bounds = option.metadata["bounds"]
        if bounds is not None and value is not None:
            check_bounds(option.name, value, bounds)
    if not 0 < args.transfer_timeout < math.inf:
        raise ConfigError(
            flag_text("--transfer-timeout", args.transfer_timeout, "it must be above 0, and finite")
        )
