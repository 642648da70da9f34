"""Hosts of a pod, from flags and the environment; no jax."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxserve.addresses import check_address
from jaxserve.config.option import option
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

COORDINATOR_PORT = 8476  # on a LeaderWorkerSet's leader; on TPUs jax itself chooses 8482
DAY = 86400  # seconds


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of the hosts that run one engine together."""

    hosts: int | None = option(None, "number of hosts that run one engine together", metavar="N")
    host_index: int | None = option(
        None, "number of this host, 0 to N-1; host 0 leads", metavar="I"
    )
    coordinator: str | None = option(
        None, "address of host 0, where the other hosts find it", metavar="HOST:PORT"
    )
    pod: bool = option(
        False, "read the hosts from the environment: a TPU slice, a LeaderWorkerSet or Slurm"
    )
    control_port: int = option(
        0, "port of host 0 for the other hosts; 0 takes any free one (default: 0)", metavar="N"
    )
    join_timeout: float = option(
        300.0, "seconds to wait until all hosts are there (default: 300)", metavar="S"
    )


@dataclass(frozen=True)
class Hosts:
    """Settings by which this process finds the other hosts.

    `count`, `index` and `coordinator` are all given, or all None.
    """

    count: int | None = None
    index: int | None = None
    coordinator: str | None = None  # HOST:PORT of host 0
    detect: bool = False  # jax asks the environment for count, index and coordinator
    control_port: int = 0  # port of host 0; 0 for any free one
    join_timeout: float = 300.0  # seconds

    @staticmethod
    def of(options: HostOptions, environment: Mapping[str, str] = os.environ) -> "Hosts":
        """Return what options and environment say; ConfigError when flags contradict each other."""
        _check_named(options)
        if not 0 <= options.control_port < 2**16:
            raise flag_error("--control-port", options.control_port, "it must be 0 to 65535")
        if not 0 < options.join_timeout <= DAY:
            allowed = f"it must be above 0 and at most {DAY} seconds"
            raise flag_error("--join-timeout", options.join_timeout, allowed)
        found = Hosts(
            options.hosts,
            options.host_index,
            options.coordinator,
            options.pod,
            options.control_port,
            options.join_timeout,
        )
        return _of_worker_set(found, environment) if options.pod else found

    @property
    def alone(self) -> bool:
        """True if this process is known to be the only host."""
        return not self.detect and self.count in (None, 1)


def _check_named(options: HostOptions) -> None:
    """Raise ConfigError unless all of the hosts' number, index and address are given, or none."""
    count = options.hosts
    index = options.host_index
    coordinator = options.coordinator
    named = {"--hosts": count, "--host-index": index, "--coordinator": coordinator}
    given = [flag for flag, value in named.items() if value is not None]
    if options.pod and given:
        raise ConfigError(
            f"--pod asks the environment for what {given[0]} says (leave one of them out)"
        )
    if count is None or index is None or coordinator is None:
        if given:
            missing = next(flag for flag in named if flag not in given)
            raise ConfigError(
                f"{missing} is missing: --hosts, --host-index and --coordinator go together"
            )
        return
    if count < 1:
        raise flag_error("--hosts", count, "it must be at least 1")
    if not 0 <= index < count:
        allowed = f"it must be 0 to {count - 1} with --hosts {count}"
        raise flag_error("--host-index", index, allowed)
    check_address("--coordinator", coordinator)


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
