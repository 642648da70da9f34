"""How many files the process of a server may open: each connection is one."""

import logging
import resource

from jaxserve.server.core.limits import Limits
from jaxserve.server.http.open_connections import RESERVE
from jaxserve.server.options import AddressOptions

OTHERS = 512  # the model's files, child processes, connections to other servers
log = logging.getLogger(__name__)


def files_of(limits: Limits, addresses: AddressOptions) -> int:
    """Return how many files a server needs that has as many connections as it may."""
    optional = (addresses.admin_port, addresses.vllm_port)
    grpc_ports = 1 + sum(port is not None for port in optional)
    http = limits.max_http_connections + RESERVE if addresses.http else 0
    return int(grpc_ports * limits.max_grpc_connections + http + OTHERS)


def allow_files(needed: int) -> None:
    """Raise this process's limit of open files as far as is needed, or is possible.

    A server that cannot accept a connection answers nobody, health checks included.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "this process may open %d files; for all connections that its flags allow it needs %d "
            "(raise ulimit -Hn, or lower --max-http-connections and --max-grpc-connections)",
            allowed,
            needed,
        )
