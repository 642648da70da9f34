"""Options of XLA for steps, beside the defaults of the jaxlib that is installed."""

from collections.abc import Iterator

import jax
import pytest
from jax._src.lib import _jax

from jaxserve.engine.device.compiler_options import GRAPHS, step_options

# Numbers of DebugOptions.CommandBufferCmdType in xla.proto.
KINDS = {
    "FUSION": 1,
    "CUBLAS": 2,
    "CUDNN": 3,
    "CONDITIONAL": 5,
    "WHILE": 6,
    "CUSTOM_CALL": 7,
    "CUBLASLT": 8,
    "DYNAMIC_SLICE_FUSION": 9,
    "COLLECTIVES_KERNEL": 13,
}
# Fields by number: CompileOptionsProto, ExecutableBuildOptionsProto, DebugOptions.
BUILD_OPTIONS = 3
DEBUG_OPTIONS = 3
COMMAND_BUFFER = 258


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of a serialized message; return it and where the next one begins."""
    value = 0
    shift = 0
    while data[at] >= 128:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and contents of a serialized message's fields that have a length."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = varint(message, at)
        elif kind == 2:
            size, at = varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]


def default_kinds() -> set[int]:
    message = _jax.CompileOptions().SerializeAsString()
    for number in (BUILD_OPTIONS, DEBUG_OPTIONS, COMMAND_BUFFER):
        message = dict(fields(message))[number]
    return set(message)


def test_loops_are_recorded_beside_what_xla_records_by_default() -> None:
    names = step_options("gpu")[GRAPHS].split(",")
    assert {KINDS[name] for name in names} == default_kinds() | {KINDS["WHILE"]}


def test_xla_knows_the_option() -> None:
    options = dict(step_options("gpu"))
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_have_no_options(platform: str) -> None:
    assert step_options(platform) == {}


def test_several_decodes_stay_outside_the_graphs() -> None:
    assert step_options("gpu", decodes=8) == {}


@pytest.mark.parametrize("flags", [f"--{GRAPHS}=", f"--a=1 --{GRAPHS}=+WHILE --b=2"])
def test_flags_of_the_user_come_first(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert step_options("gpu") == {}


def test_a_flag_whose_name_is_longer_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}_va_remapping=true")
    assert GRAPHS in step_options("gpu")
