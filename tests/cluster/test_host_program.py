"""Arguments that the hosts of a group get."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.ray.host_program import HostProgram

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ADDRESSES = ["10.0.0.1", "10.0.0.2"]
FREE = [1001, 1002, 1003]


def test_hosts_of_an_engine_are_told_of_each_other() -> None:
    program = HostProgram(("generate", "--batch-file", "in.jsonl"))
    assert program.of_host(1, ADDRESSES, FREE) == [
        *("generate", "--batch-file", "in.jsonl"),
        *("--hosts", "2", "--host-index", "1", "--coordinator", "10.0.0.1:1001"),
    ]
    assert not program.serves


def test_a_host_alone_is_told_of_nobody() -> None:
    program = HostProgram(("serve", "m"))
    assert program.of_host(0, ["10.0.0.1"], FREE) == [
        *("serve", "m", "--host", "10.0.0.1", "--port", "1002", "--http-port", "1003")
    ]
    assert program.url("10.0.0.1", 1003) == "http://10.0.0.1:1003"


def test_what_is_given_stays() -> None:
    program = HostProgram(("serve", "m", "--http-port=80", "--port", "9"))
    assert program.of_host(0, ["10.0.0.1"], FREE) == [*(*program.arguments, "--host", "10.0.0.1")]
    assert program.url("fd00::1", 1003) == "http://[fd00::1]:80"


def test_followers_take_any_port() -> None:
    arguments = HostProgram(("serve", "m")).of_host(1, ADDRESSES, FREE)
    assert arguments[arguments.index("--port") + 1] == "0"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("serve", "--hosts", "2"), "--hosts is for the group of hosts to say; leave it out"),
        (("serve", "--pod"), "--pod is for the group of hosts to say; leave it out"),
        (("serve", "--host=0.0.0.0"), "--host is for the group of hosts to say; leave it out"),
        (("serve", "--no-http"), "--no-http is for the group of hosts to say; leave it out"),
        (("serve", "--http-port", "0"), "--http-port is 0; leave it out, which takes a free port"),
        (("serve", "--tls-cert=a"), "--tls-cert: the group of hosts asks its server over plain"),
    ],
)
def test_flags_of_the_group_are_refused(arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        HostProgram(arguments)
