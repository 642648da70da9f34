"""The limit of open files of a server's process."""

import logging
import resource
from dataclasses import dataclass

import pytest

from jaxserve.server.core.limits import Limits
from jaxserve.server.open_files import OTHERS, allow_files, files_of
from jaxserve.server.options import AddressOptions


@dataclass
class Limit:
    """The process's limit, as `resource` has it."""

    soft: int
    hard: int


def with_limit(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> Limit:
    limit = Limit(soft, hard)

    def set_limit(kind: int, values: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        limit.soft, limit.hard = values

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit.soft, limit.hard))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    return limit


@pytest.mark.parametrize(
    "soft, hard, after, warns",
    [
        (1024, 20_000, 5000, False),
        (1024, resource.RLIM_INFINITY, 5000, False),
        (8000, 20_000, 8000, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, False),
        (1024, 4096, 4096, True),
    ],
)
def test_the_limit_is_raised_as_far_as_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    after: int,
    warns: bool,
) -> None:
    caplog.set_level(logging.WARNING, "jaxserve")
    limit = with_limit(monkeypatch, soft, hard)
    allow_files(5000)
    assert (limit.soft, limit.hard) == (after, hard)
    assert ("may open 4096 files" in caplog.text) == warns


def test_every_port_has_connections() -> None:
    limits = Limits(max_http_connections=100, max_grpc_connections=10)
    without_http = files_of(limits, AddressOptions(http=False))
    assert without_http == 10 + OTHERS
    assert files_of(limits, AddressOptions()) > without_http + 100
    ports = AddressOptions(http=False, admin_port=0, vllm_port=0)
    assert files_of(limits, ports) == without_http + 20
