"""jaxserve serve on two processes: clients talk to host 0; hosts end together."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import Client
from jaxserve.errors import JaxserveError, RestartingError
from tests.jaxserve.cluster.processes import Pod, free_port

pytestmark = pytest.mark.system
MESH = ("--data", "2", "--tensor", "2")
FLAGS = (*MESH, "--deterministic", "--no-http")


@dataclass
class RunningPod:
    """A pod of two hosts, a client of host 0, and the gRPC ports of both."""

    pod: Pod
    client: Client
    ports: list[int]


@contextlib.contextmanager
def running_pod(*flags: str, always: Sequence[str] = FLAGS) -> Iterator[RunningPod]:
    """Start a pod of two hosts and wait until it is ready."""
    with Pod(2, "serve") as pod:
        ports = [free_port(), free_port()]
        for index, port in enumerate(ports):
            pod.start(index, "--port", str(port), *always, *flags)
        with Client(f"127.0.0.1:{ports[0]}") as client:
            while True:
                assert all(host.popen.poll() is None for host in pod.hosts.values()), pod.all_output
                with contextlib.suppress(JaxserveError):
                    client.wait_ready(timeout=2)
                    break
            yield RunningPod(pod, client, ports)


def health(port: int) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        found = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        return health_pb2.HealthCheckResponse.ServingStatus.Name(found.status)


def stream_and_signal(running_pod: RunningPod, number: int, host: int, choices: int = 16) -> int:
    """Read a stream and signal a host after its first tokens; return how many tokens came."""
    received = 0
    signalled = False
    with running_pod.client.stream(
        "Once upon a time", max_tokens=300, ignore_eos=True, temperature=0, n=choices
    ) as stream:
        for event in stream:
            received += len(getattr(event, "token_ids", ()))
            if received and not signalled:
                running_pod.pod.hosts[host].popen.send_signal(number)
                signalled = True
    return received


def test_a_follower_that_is_killed_ends_the_pod() -> None:
    with running_pod() as s:
        text = s.client.generate("Once upon a time", max_tokens=12, temperature=0).choices[0].text
        assert (
            s.client.generate("Once upon a time", max_tokens=12, temperature=0).choices[0].text
            == text
        )
        assert s.client.server_info().compiles_after_ready == 0
        assert s.client.server_info().mesh == {"data": 2, "expert": 1, "tensor": 2}
        assert [health(port) for port in s.ports] == [
            "SERVING"
        ] * 2  # what probes of both kinds of pods ask
        with pytest.raises(RestartingError):
            stream_and_signal(s, signal.SIGKILL, host=1)
        assert s.pod.wait() == [70, -signal.SIGKILL], s.pod.all_output
        assert "host 1 is gone" in s.pod.hosts[0].errors


@pytest.mark.slow
def test_steps_that_come_later_are_used_when_every_host_has_them() -> None:
    """Requests go on meanwhile, and the hosts launch the same steps."""
    with running_pod("--ready-when", "first", "--decode-steps", "2", always=MESH) as s:
        info = s.client.server_info()
        texts = set()
        until = time.monotonic() + 120
        while info.buckets_pending and time.monotonic() < until:
            answer = s.client.generate("Once upon a time", max_tokens=12, temperature=0)
            texts.add(answer.choices[0].text)
            time.sleep(0.5)  # in which the cores compile
            info = s.client.server_info()
        answer = s.client.generate("Once upon a time", max_tokens=12, temperature=0)
        assert {*texts, answer.choices[0].text} == {answer.choices[0].text}
        later = ["decode[1]", "decode[1] x 2", "decode[2] x 2", "prefill[2x16]"]
        assert info.buckets_pending == 0 and info.compiles_after_ready == 0
        assert info.background_compiles == len(later)
        s.pod.hosts[0].popen.send_signal(signal.SIGTERM)
        assert s.pod.wait() == [0, 0], s.pod.all_output
        assert f"{len(info.buckets)} steps compiled" in s.pod.hosts[0].errors


@pytest.mark.slow
def test_a_follower_that_hangs_ends_the_pod() -> None:
    """The follower's connections stay open while the leader waits in a collective."""
    with running_pod() as s:
        began = time.monotonic()
        with pytest.raises(RestartingError):
            stream_and_signal(s, signal.SIGSTOP, host=1)
        assert time.monotonic() - began > 4
        assert s.pod.hosts[0].popen.wait(60) == 70, s.pod.all_output
        assert "host 1 has sent no heartbeat for 5 s" in s.pod.hosts[0].errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_followers_do_not_outlive_their_leader(number: int) -> None:
    with running_pod() as s:
        s.pod.hosts[0].popen.send_signal(number)
        code = s.pod.hosts[1].popen.wait(60)
        # Where the leader's machine closes its connections, jax's own abort may be faster than the
        # exit of ours.
        assert code == 70 or (code == -signal.SIGABRT and number == signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(0,), (1,)])
def test_sigterm_drains_whichever_host_gets_it(hosts: tuple[int, ...]) -> None:
    with running_pod("--drain-timeout", "600") as s:
        for host in hosts:
            assert stream_and_signal(s, signal.SIGTERM, host, choices=1) == 300
        assert s.pod.wait() == [0, 0], s.pod.all_output
        assert "draining" in s.pod.hosts[0].errors


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_told_so_and_the_pod_ends() -> None:
    with running_pod("--drain-timeout", "1") as s:
        with pytest.raises(JaxserveError, match="drain-timeout"):
            stream_and_signal(s, signal.SIGTERM, host=1)
        assert s.pod.wait() == [0, 0], s.pod.all_output
