"""Flags of two meshes in one process: --prefill-mesh, --decode-mesh, and what excludes them."""

import jax
import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.disaggregation.flags import Meshes, disaggregation
from jaxserve.server.disaggregation.local_mesh import places
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.flags import meshes_of, parse
from jaxserve.sharding.mesh import MeshSpec, ShardingError

BOTH = ("--prefill-mesh", "4", "--decode-mesh", "4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prefill-mesh", "4"), "--prefill-mesh and --decode-mesh go together"),
        (("--decode-mesh", "4"), "--prefill-mesh and --decode-mesh go together"),
        (
            ("--prefill-mesh", "0", "--decode-mesh", "4"),
            "--prefill-mesh is 0; it must be at least 1",
        ),
        ((*BOTH, "--role", "prefill"), "--role is prefill; with --prefill-mesh"),
        (
            (*BOTH, "--role", "decode", "--prefill-server", "a:1"),
            "--role is decode; with --prefill-mesh",
        ),
        ((*BOTH, "--prefill-server", "a:1"), "--prefill-server is for --role decode"),
        ((*BOTH, "--tensor", "2"), "--tensor is 2; --prefill-mesh"),
        ((*BOTH, "--data", "2"), "--data is 2; --prefill-mesh"),
        ((*BOTH, "--expert", "2"), "--expert is 2; --prefill-mesh"),
        ((*BOTH, "--hosts", "2"), "--hosts is not built in together with --prefill-mesh"),
        ((*BOTH, "--pod"), "--pod is not built in together with --prefill-mesh"),
        ((*BOTH, "--bundle", "folder"), "--bundle is not built in together with --prefill-mesh"),
        ((*BOTH, "--prefill-threshold", "0"), "--prefill-threshold is 0"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: tuple[str, ...], message: str) -> None:
    options = parse(["--model", "folder", *flags])
    with pytest.raises(ConfigError) as error:
        meshes_of(options)
        disaggregation(options.roles, options.credentials)
    assert message in str(error.value)


def test_flags_apply() -> None:
    options = parse(
        [
            "--model",
            "m",
            *BOTH,
            "--prefill-threshold",
            "99",
            "--prefill-queue-tokens",
            "7",
            "--transfer-timeout",
            "3",
        ]
    )
    assert meshes_of(options) == Meshes(4, 4, Policy(99, 7), 3.0)
    assert meshes_of(parse(["--model", "m"])) is None


def test_devices_are_dealt_out() -> None:
    policy = Policy(512, 2**15)
    first, second = places(Meshes(2, 4, policy, 1.0), jax.devices())
    assert [*first.devices, *second.devices] == jax.devices()[:6] and second.mesh == MeshSpec(
        tensor=4
    )
    with pytest.raises(
        ConfigError, match="--prefill-mesh 4 and --decode-mesh 6 need 10 devices; 8 are present"
    ):
        places(Meshes(4, 6, policy, 1.0), jax.devices())
    with pytest.raises(ShardingError, match="--decode-mesh 4: it is too large"), second.named():
        raise ShardingError("it is too large")
