"""Flags of servers that compute prompts and decode apart, and what they ask for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxserve.addresses import server_problem
from jaxserve.config.option import UNBOUNDED, check_bounds, flag_of, option, options_of
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.server.disaggregation.addresses import read_addresses
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.options import CredentialOptions
from jaxserve.server.security.files import read_certificates, read_file, read_token

ROLES = ("both", "prefill", "decode")
MEBI = 2**20
TWO_MESHES = "--prefill-mesh and --decode-mesh"


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """Flags of --role, and of two meshes in one server, as the operator gives them."""

    prefill_mesh: int | None = option(
        None,
        "compute long prompts on a mesh of their own: the first N devices, which share the "
        "heads (needs --decode-mesh)",
        metavar="N",
        bounds=(1, UNBOUNDED),
    )
    decode_mesh: int | None = option(
        None,
        "do everything else on the next N devices, which hold the weights as well (needs "
        "--prefill-mesh)",
        metavar="N",
        bounds=(1, UNBOUNDED),
    )
    role: str = option(
        "both",
        "prefill computes prompts for decode servers only, decode hands long prompts over to "
        "prefill servers, both does neither (default: both)",
        choices=ROLES,
    )
    prefill_server: tuple[str, ...] = option(
        (), "address of a prefill server's gRPC; may be given several times", metavar="HOST:PORT"
    )
    prefill_servers_file: Path | None = option(
        None,
        "file with addresses of prefill servers, one per line; read again when it changes",
        metavar="F",
    )
    prefill_threshold: int = option(
        512,
        "hand a prompt over if at least N of its tokens are not cached here (default: 512)",
        metavar="N",
        bounds=(1, UNBOUNDED),
    )
    prefill_queue_tokens: int = option(
        32768,
        "compute a prompt here while every prefill server has more than N tokens waiting "
        "(default: 32768)",
        metavar="N",
        bounds=(0, UNBOUNDED),
    )
    prefill_token_file: Path | None = option(
        None, "file with the token that prefill servers ask for", metavar="F"
    )
    prefill_tls_ca: Path | None = option(
        None,
        "PEM file of the authority that vouches for prefill servers; turns TLS on, and "
        "--tls-cert is shown to them (default: plain text)",
        metavar="F",
    )
    transfer_buffer: int = option(
        2048,
        "most memory in MiB for pages that are offered or fetched (default: 2048)",
        metavar="MIB",
        bounds=(1, UNBOUNDED),
    )
    transfer_timeout: float = option(
        60.0,
        "seconds for the trip of a prompt, or for pages on offer; after that the prompt is "
        "computed here (default: 60)",
        metavar="S",
    )


@dataclass(frozen=True)
class Meshes:
    """Sizes of the two meshes of --prefill-mesh and --decode-mesh, in devices."""

    prefill: int
    decode: int
    policy: Policy
    seconds: float  # time for the trip of a prompt from one mesh to the other


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Settings of --role prefill and --role decode."""

    role: str
    servers: tuple[str, ...]
    servers_file: Path | None
    policy: Policy
    buffer: int  # bytes
    seconds: float  # time for the trip of a prompt
    token: str | None = None  # sent to prefill servers
    # PEM, for calls to prefill servers; without `ca` there is no TLS.
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    @property
    def prefills(self) -> bool:
        """True for a server that computes prompts for decode servers."""
        return self.role == "prefill"


def disaggregation(roles: RoleOptions, credentials: CredentialOptions) -> Disaggregation | None:
    """Return the settings of the role; None for --role both.

    Raises ConfigError for options that do not go together, and for files that cannot be read.
    """
    check_role(roles)
    if roles.role == "both":
        return None
    if roles.prefill_servers_file:
        read_addresses(roles.prefill_servers_file)
    certificate = key = None
    if roles.prefill_tls_ca and credentials.tls_cert and credentials.tls_key:
        certificate = read_file(credentials.tls_cert, "--tls-cert")
        key = read_file(credentials.tls_key, "--tls-key")
    return Disaggregation(
        role=roles.role,
        servers=roles.prefill_server,
        servers_file=roles.prefill_servers_file,
        policy=_policy(roles),
        buffer=roles.transfer_buffer * MEBI,
        seconds=roles.transfer_timeout,
        token=read_token(roles.prefill_token_file, "--prefill-token-file"),
        ca=read_certificates(roles.prefill_tls_ca, "--prefill-tls-ca"),
        certificate=certificate,
        key=key,
    )


def meshes(roles: RoleOptions, axes: Mapping[str, int]) -> Meshes | None:
    """Return the two meshes of one server; None where a single mesh does everything.

    Args:
        axes: Sizes of the mesh that --data, --expert and --tensor ask for.

    Raises:
        ConfigError: Options do not go together.
    """
    prefill = roles.prefill_mesh
    decode = roles.decode_mesh
    if prefill is None and decode is None:
        return None
    if prefill is None or decode is None:
        raise ConfigError(f"{TWO_MESHES} go together (give both)")
    _check_bounds(roles)
    if roles.role != "both":
        problem = f"with {TWO_MESHES} this server does both (leave one of them out)"
        raise flag_error("--role", roles.role, problem)
    for axis, size in axes.items():
        if size != 1:
            problem = f"{TWO_MESHES} say how many devices share the heads (leave it out)"
            raise flag_error(f"--{axis}", size, problem)
    return Meshes(prefill, decode, _policy(roles), roles.transfer_timeout)


def _policy(roles: RoleOptions) -> Policy:
    return Policy(roles.prefill_threshold, roles.prefill_queue_tokens)


def check_role(roles: RoleOptions) -> None:
    """Raise ConfigError for options that do not go with --role, or are out of bounds."""
    for name in ("prefill_server", "prefill_servers_file", "prefill_token_file", "prefill_tls_ca"):
        if getattr(roles, name) and roles.role != "decode":
            raise ConfigError(f"{flag_of(name)} is for --role decode (this is --role {roles.role})")
    if roles.role == "decode" and not (roles.prefill_server or roles.prefill_servers_file):
        problem = "no server computes its prompts (give --prefill-server or --prefill-servers-file)"
        raise flag_error("--role", "decode", problem)
    for address in roles.prefill_server:
        if problem := server_problem(address):
            raise flag_error("--prefill-server", address, problem)
    _check_bounds(roles)


def _check_bounds(roles: RoleOptions) -> None:
    for field in options_of(RoleOptions):
        value = getattr(roles, field.name)
        bounds = field.metadata["bounds"]
        if bounds is not None and value is not None:
            check_bounds(field.name, value, bounds)
    seconds = roles.transfer_timeout
    if not 0 < seconds < math.inf:
        raise flag_error("--transfer-timeout", seconds, "it must be above 0, and finite")
