"""Hosts of a pod from flags and the environment, and contradictions among them."""

import pytest

from jaxserve.cluster.bootstrap import SingleHost, join
from jaxserve.cluster.hosts import Hosts
from jaxserve.errors import ConfigError
from jaxserve.generate.flags import parse as parse_generate
from jaxserve.server.flags import parse as parse_serve

WORKER_SET = {
    "LWS_LEADER_ADDRESS": "llm-0.llm.default",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "2",
}


def hosts(*flags: str, **environment: str) -> Hosts:
    found = [Hosts.of(parse(flags).hosts, environment) for parse in (parse_generate, parse_serve)]
    assert found[0] == found[1]
    return found[0]


def test_without_flags_there_is_one_host() -> None:
    assert (
        hosts().alone and hosts("--hosts", "1", "--host-index", "0", "--coordinator", "x:1").alone
    )
    with join(hosts(**WORKER_SET)) as pod:
        assert isinstance(pod, SingleHost) and pod.leads, "the environment is asked by --pod alone"


def test_by_flags() -> None:
    given = ("--hosts", "4", "--host-index", "3", "--coordinator", "10.0.0.1:8476")
    assert hosts(*given) == Hosts(4, 3, "10.0.0.1:8476")
    assert hosts(*given, "--control-port", "9000", "--join-timeout", "60").control_port == 9000
    assert not hosts(*given).alone


def test_of_a_leader_worker_set() -> None:
    assert hosts("--pod", **WORKER_SET) == Hosts(4, 2, "llm-0.llm.default:8476", detect=True)


def test_on_a_tpu_slice_jax_knows_by_itself() -> None:
    on_gke = WORKER_SET | {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}
    for environment in ({}, on_gke):
        found = hosts("--pod", **environment)
        assert found == Hosts(detect=True) and not found.alone


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--hosts 2",
            "--host-index is missing: --hosts, --host-index and --coordinator go together",
        ),
        ("--hosts 2 --host-index 0", "--coordinator is missing"),
        ("--host-index 1 --coordinator a:1", "--hosts is missing"),
        (
            "--hosts 2 --host-index 2 --coordinator a:1",
            "--host-index is 2; it must be 0 to 1 with --hosts 2",
        ),
        (
            "--hosts 2 --host-index -1 --coordinator a:1",
            "--host-index is -1; it must be 0 to 1 with --hosts 2",
        ),
        ("--hosts 0 --host-index 0 --coordinator a:1", "--hosts is 0; it must be at least 1"),
        (
            "--hosts 2 --host-index 0 --coordinator a",
            "--coordinator is a; it must be HOST:PORT, like",
        ),
        (
            "--pod --hosts 2 --host-index 0 --coordinator a:1",
            "--pod asks the environment for what --hosts says",
        ),
        (
            "--hosts 2 --host-index 0 --coordinator a:99999",
            "--coordinator is a:99999; its port must be 1 to 65535",
        ),
        (
            "--hosts 2 --host-index 0 --coordinator :1",
            "--coordinator is :1; it must be HOST:PORT, like",
        ),
        ("--pod --control-port 65536", "--control-port is 65536; it must be 0 to 65535"),
        ("--pod --join-timeout 0", "--join-timeout is 0; it must be above 0"),
        (
            "--pod --join-timeout nan",
            "--join-timeout is nan; it must be above 0 and at most 86400 seconds",
        ),
    ],
)
def test_what_does_not_fit_together_is_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hosts(*flags.split())
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
