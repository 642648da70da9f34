"""Hosts of a pod, from flags and the environment; no jax."""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxserve.addresses import check_address
from jaxserve.errors import ConfigError, flag_text

COORDINATOR_PORT = 8476  # on a LeaderWorkerSet's leader; on TPUs jax itself chooses 8482
DAY = 86400  # seconds


@dataclass(frozen=True)
class Hosts:
    """How this process finds the other hosts.

    `count`, `index` and `coordinator` (HOST:PORT of host 0) are all given, or all None.
    `detect`: jax asks the environment for them. `control_port` is that of host 0, 0 for any free
    one. `join_timeout` is in seconds.
    """

    count: int | None = None
    index: int | None = None
    coordinator: str | None = None
    detect: bool = False
    control_port: int = 0
    join_timeout: float = 300.0

    @staticmethod
    def of(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> "Hosts":
        """Return what flags and environment say; ConfigError when flags contradict each other."""
        named = {
            "--hosts": args.hosts,
            "--host-index": args.host_index,
            "--coordinator": args.coordinator,
        }
        given = [flag for flag, value in named.items() if value is not None]
        if args.pod and given:
            raise ConfigError(
                f"--pod asks the environment for what {given[0]} says (leave one of them out)"
            )
        if given and len(given) < len(named):
            missing = next(flag for flag in named if flag not in given)
            raise ConfigError(
                f"{missing} is missing: --hosts, --host-index and --coordinator go together"
            )
        if given and args.hosts < 1:
            raise ConfigError(flag_text("--hosts", args.hosts, "it must be at least 1"))
        if given and not 0 <= args.host_index < args.hosts:
            allowed = f"it must be 0 to {args.hosts - 1} with --hosts {args.hosts}"
            raise ConfigError(flag_text("--host-index", args.host_index, allowed))
        if given:
            check_address("--coordinator", args.coordinator)
        if not 0 <= args.control_port < 2**16:
            raise ConfigError(
                flag_text("--control-port", args.control_port, "it must be 0 to 65535")
            )
        if not 0 < args.join_timeout <= DAY:
            allowed = f"it must be above 0 and at most {DAY} seconds"
            raise ConfigError(flag_text("--join-timeout", args.join_timeout, allowed))
        found = Hosts(
            args.hosts,
            args.host_index,
            args.coordinator,
            args.pod,
            args.control_port,
            args.join_timeout,
        )
        return _of_worker_set(found, environment) if args.pod else found

    @property
    def alone(self) -> bool:
        """True if this process is known to be the only host."""
        return not self.detect and self.count in (None, 1)


def _of_worker_set(found: Hosts, environment: Mapping[str, str]) -> Hosts:
    """Complete `found` from the variables of a Kubernetes LeaderWorkerSet.

    On TPUs jax finds the hosts by itself.
    """
    if "LWS_LEADER_ADDRESS" not in environment or "TPU_WORKER_HOSTNAMES" in environment:
        return found
    return replace(
        found,
        count=int(environment["LWS_GROUP_SIZE"]),
        index=int(environment["LWS_WORKER_INDEX"]),
        coordinator=f"{environment['LWS_LEADER_ADDRESS']}:{COORDINATOR_PORT}",
    )


def leave(code: int) -> int:
    """Return the exit code; end the process at once if its pod has not ended in order.

    At a normal exit jax would wait for the other hosts.
    """
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
