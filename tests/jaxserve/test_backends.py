"""JAX's backends that do not start are one line that says what to do, and exit code 2.

Origin: jax-ml/jax#13260, a traceback of many lines whose last one has the reason. The errors are
those of jax 0.12.0.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxserve import LLM
from jaxserve.backends import devices, importing_jax
from jaxserve.errors import ConfigError

MODEL = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat-draft"
NO_TPU = (
    "Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so: libtpu.so: cannot "
    "open shared object file: No such file or directory"
)
ADVICE = " (set JAX_PLATFORMS='' to automatically choose an available backend)"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(NO_TPU + ADVICE), NO_TPU),
        (AssertionError(), "the platform's plugin is not installed"),
        (RuntimeError("INTERNAL: CUDA_ERROR_UNKNOWN\nand a stack\nof lines"), "CUDA_ERROR_UNKNOWN"),
    ],
)
@pytest.mark.parametrize("chosen", ["tpu", None])
def test_the_line(
    error: Exception, reason: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    if chosen:
        monkeypatch.setenv("JAX_PLATFORMS", chosen)
    else:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ConfigError, match="jax finds no devices: ") as caught:
        LLM(MODEL)
    text = str(caught.value)
    assert reason in text and "\n" not in text and "set JAX_PLATFORMS=''" not in text
    assert ("unset JAX_PLATFORMS=tpu" in text) == bool(chosen) and "jaxserve doctor" in text


def test_devices_that_there_are() -> None:
    assert list(devices()) == jax.devices()


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("JAX_ENABLE_X64", "invalid truth value 'banana' for environment 'JAX_ENABLE_X64'"),
        ("JAX_NUM_CPU_DEVICES", 'Invalid value "x" for JAX flag jax_num_cpu_devices'),
        ("JAX_DEFAULT_DEVICE", "jax.default_device must be passed either a Device object"),
    ],
)
def test_a_wrong_variable(variable: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(ConfigError, match=r"\(correct or unset the variable\)"), importing_jax():
        raise ValueError(message)
    with pytest.raises(ValueError, match="of something else"), importing_jax():
        raise ValueError("of something else")


@pytest.mark.system
@pytest.mark.parametrize(
    ("variable", "value", "command"),
    [
        ("JAX_PLATFORMS", "nothing", "jaxserve.generate MODEL --prompt text"),
        ("JAX_PLATFORMS", "nothing", "jaxserve.serve MODEL --port 0 --http-port 0"),
        ("JAX_PLATFORMS", "nothing", "jaxserve.bench startup --model MODEL --repetitions 1"),
        ("JAX_ENABLE_X64", "banana", "jaxserve.plan MODEL --topology cpu --no-compile"),
        ("JAX_DEFAULT_DEVICE", "tpu:0", "jaxserve.convert MODEL TARGET"),
    ],
)
def test_commands(variable: str, value: str, command: str, tmp_path: Path) -> None:
    words = command.replace("MODEL", str(MODEL)).replace("TARGET", str(tmp_path / "new")).split()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env=os.environ | {variable: value},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and value in line and variable.lower()[4:] in line.lower()
