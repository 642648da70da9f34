"""Flags of --role, and their combinations."""

import shutil
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.disaggregation.flags import Disaggregation, disaggregation
from jaxserve.server.flags import parse
from tests.jaxserve.client.test_connection import signed


def plan_of(*flags: str) -> Disaggregation | None:
    options = parse(flags)
    return disaggregation(options.roles, options.credentials)


DECODE = ["--role", "decode", "--prefill-server", "a:1"]


def test_by_default_nothing() -> None:
    assert plan_of() is None


def test_a_decode_server(tmp_path: Path) -> None:
    token = tmp_path / "token"
    file = tmp_path / "servers"
    token.write_text("secret\n")
    file.write_text("c:3\n")
    more = [
        "--prefill-server",
        "b:2",
        "--prefill-servers-file",
        str(file),
        "--prefill-token-file",
        str(token),
    ]
    plan = plan_of(*DECODE, *more, "--prefill-threshold", "7", "--transfer-buffer", "3")
    assert plan and not plan.prefills
    assert (plan.servers, plan.servers_file, plan.token) == (("a:1", "b:2"), file, "secret")
    assert (plan.policy.threshold, plan.buffer, plan.seconds) == (7, 3 * 2**20, 60.0)
    assert plan.ca is plan.certificate is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
def test_certificates_go_together(tmp_path: Path) -> None:
    files = dict(zip(("cert", "key"), signed(tmp_path, "own"), strict=True))
    files["ca"], _ = signed(tmp_path, "ca")
    ca, cert, key = (files[name].read_bytes() for name in ("ca", "cert", "key"))
    own = ["--tls-cert", str(files["cert"]), "--tls-key", str(files["key"])]
    plan = plan_of(*DECODE, *own)
    assert plan and plan.certificate is None, "nothing is shown without TLS"
    plan = plan_of(*DECODE, *own, "--prefill-tls-ca", str(files["ca"]))
    assert plan and (plan.ca, plan.certificate, plan.key) == (ca, cert, key)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--role", "decode"], "no server computes its prompts"),
        (["--prefill-server", "a:1"], "is for --role decode"),
        (["--role", "prefill", "--prefill-servers-file", "f"], "is for --role decode"),
        (
            ["--role", "decode", "--prefill-server", "a"],
            "it must be HOST:PORT, like",
        ),
        (["--role", "decode", "--prefill-servers-file", "/nowhere"], "No such file"),
        ([*DECODE, "--prefill-token-file", "/nowhere"], "No such file"),
        ([*DECODE, "--prefill-tls-ca", "/nowhere"], "No such file"),
        ([*DECODE, "--prefill-threshold", "0"], "at least 1"),
        ([*DECODE, "--prefill-queue-tokens", "-1"], "at least 0"),
        ([*DECODE, "--transfer-buffer", "0"], "at least 1"),
        ([*DECODE, "--transfer-timeout", "0"], "above 0"),
        ([*DECODE, "--transfer-timeout", "inf"], "above 0"),
        ([*DECODE, "--transfer-timeout", "nan"], "above 0"),
    ],
)
def test_what_does_not_go_together(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_of(*flags)
