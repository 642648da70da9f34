"""Join the hosts of a pod, one process on each."""

import atexit
import os
import secrets
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxserve.cluster.compatibility import Facts, Judge
from jaxserve.cluster.heartbeat import FAILED, PodFailure, print_failure
from jaxserve.cluster.hosts import Hosts, leave
from jaxserve.cluster.message_auth import SECRET_BYTES
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

if TYPE_CHECKING:
    from jaxserve.cluster.follower import Follower
    from jaxserve.cluster.leader import Leader

INVITATION_BYTES = 512  # host 0's message to the others: the secret, and its control address


class SingleHost:
    """The only host: a pod without other hosts to agree with or to watch."""

    leads: Literal[True] = True
    host: Final = 0
    new_runner: Final = DeviceRunner

    def told(self, value: Callable[[], str]) -> str:
        return value()

    def all_same(self, stage: str, value: Callable[[], str]) -> bool:
        return True

    def agree(self, stage: str, facts: Callable[[], Facts], judge: Judge | None = None) -> None:
        pass

    def watch(
        self, lost: Callable[[PodFailure], None], evicted: Callable[[str], None], grace: float
    ) -> None:
        pass

    def fail(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


type Pod = SingleHost | Leader | Follower


def join(hosts: Hosts) -> Pod:
    """Wait for the other hosts and open the control stream. Call it before any computation of jax.

    Host 0 becomes the leader. ConfigError when the hosts cannot form a pod; the process ends when
    some do not come in time.
    """
    if hosts.alone:
        return SingleHost()
    timer = threading.Timer(hosts.join_timeout, _give_up, (hosts,))
    timer.daemon = True
    timer.start()
    try:
        _keep_standard_output()
        _initialize(hosts)
        atexit.register(leave, FAILED)
        if jax.process_count() == 1:
            return SingleHost()
        _check_devices()
        return _lead(hosts) if jax.process_index() == 0 else _follow()
    finally:
        timer.cancel()


def _give_up(hosts: Hosts) -> None:
    """End the process with a line of text: jax's own timeout would abort it with a stack trace."""
    number = f"all of the {hosts.count} hosts" if hosts.count else "all hosts"
    print_failure(
        PodFailure(
            f"not {number} came within {hosts.join_timeout:g} s (start the others, or raise "
            f"--join-timeout)"
        )
    )
    os._exit(FAILED)


def _keep_standard_output() -> None:
    """Keep standard output for Python; what gloo's C++ code prints goes to standard error."""
    out = open(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = out


def _check_port(coordinator: str) -> None:
    """Raise ConfigError if host 0 cannot listen at the coordinator's port: jax would crash."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        problem = f"host 0 cannot listen there: {os.strerror(error.errno or 0)}"
        raise flag_error("--coordinator", coordinator, problem) from None


def _initialize(hosts: Hosts) -> None:
    if hosts.coordinator and hosts.index == 0:
        _check_port(hosts.coordinator)
    # jax's preemption service would catch SIGTERM before the server's lifecycle sees it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            hosts.coordinator,
            hosts.count,
            hosts.index,
            cluster_detection_method="deactivate" if hosts.coordinator else None,
            initialization_timeout=int(hosts.join_timeout) + 60,  # later than _give_up
            shutdown_timeout_seconds=10,
        )
    except (ValueError, OSError) as error:  # OSError: a metadata server does not answer
        raise ConfigError(
            f"--pod: the environment does not say who the hosts are: {error} (give --hosts)"
        ) from None


def _check_devices() -> None:
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"host {host} has {count}" for host, count in sorted(counts.items()))
        raise ConfigError(f"all hosts of a pod need the same number of devices: {shown}")


def _lead(hosts: Hosts) -> "Leader":
    from jaxserve.cluster.leader import Leader  # late: it imports gRPC, of no use to a single host

    secret = secrets.token_bytes(SECRET_BYTES)
    leader = Leader(jax.process_count(), hosts.control_port, secret)
    name = (
        hosts.coordinator.rpartition(":")[0]
        if hosts.coordinator
        else socket.gethostbyname(socket.gethostname())
    )
    _broadcast(secret + f"{name}:{leader.port}".encode())
    leader.wait_for_followers()
    return leader


def _follow() -> "Follower":
    from jaxserve.cluster.follower import Follower

    invitation = _broadcast(b"")
    secret = invitation[:SECRET_BYTES]
    address = invitation[SECRET_BYTES:].decode()
    follower = Follower(address, jax.process_index(), secret)
    follower.call()
    return follower


def _broadcast(invitation: bytes) -> bytes:
    """Return host 0's invitation on every host.

    It travels over the links of the devices, so that only hosts of this job see the secret.
    """
    padded = np.frombuffer(invitation.ljust(INVITATION_BYTES, b"\0"), np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(padded)).rstrip(b"\0")
