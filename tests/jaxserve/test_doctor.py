"""The doctor: what it sees on machines that are files here, and on this one."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from huggingface_hub import constants
from rich.console import Console

from jaxserve.doctor import machine as seen
from jaxserve.doctor.__main__ import main, seen_by_jax, show
from jaxserve.doctor.devices import devices, kernels, unused_accelerator
from jaxserve.doctor.machine import (
    Finding,
    folders,
    has_tpu,
    hub_folder,
    machine,
    nvidia_driver,
)
from jaxserve.pallas_kernels.errors import KernelError

ROOT = Path(__file__).parents[2]
# As the files of an open and of a closed kernel module begin.
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root)"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\n"


def with_gpu(root: Path, driver: str = OPEN) -> Path:
    path = root / "proc" / "driver" / "nvidia" / "version"
    path.parent.mkdir(parents=True)
    path.write_text(f"{driver}\nGCC version:  gcc version 13.3.0\n")
    return root


def with_pci_device(root: Path, device: str) -> Path:
    folder = root / "sys" / "bus" / "pci" / "devices" / "0000:00:04.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x1ae0\n")
    (folder / "device").write_text(f"{device}\n")
    return root


def with_tpu(root: Path) -> Path:
    return with_pci_device(root, "0x0063")


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_memory_and_drivers(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    found = by_name(machine(tmp_path))
    assert found["memory"].value == "32.0 of 64.0 GiB available"
    assert "NVIDIA driver" not in found and nvidia_driver(tmp_path) is None


@pytest.mark.parametrize(
    ("driver", "version", "plugin", "fault"),
    [
        (OPEN, "580.95.05", "0.11", ""),
        (CLOSED, "550.54.15", None, ""),
        (CLOSED, "550.54.15", "0.11", "jax-cuda13-plugin needs driver 580 or newer"),
    ],
)
def test_the_driver_of_a_gpu(
    tmp_path: Path,
    driver: str,
    version: str,
    plugin: str | None,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seen, "installed_version", lambda package: plugin)
    finding = by_name(machine(with_gpu(tmp_path, driver)))["NVIDIA driver"]
    assert finding.value == version and finding.fault.startswith(fault)
    assert bool(finding.fault) == bool(fault)


def test_an_accelerator_that_jax_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    gpu, tpu = with_gpu(tmp_path / "gpu"), with_tpu(tmp_path / "tpu")
    network = with_pci_device(tmp_path / "network", "0x0042")
    assert has_tpu(tpu) and not has_tpu(gpu) and not has_tpu(network)
    monkeypatch.setattr("jaxserve.doctor.devices.installed_version", lambda package: None)
    assert "pip install 'jaxserve[cuda13]'" in unused_accelerator("cpu", gpu)
    assert "pip install 'jaxserve[tpu]'" in unused_accelerator("cpu", tpu)
    monkeypatch.setattr("jaxserve.doctor.devices.installed_version", lambda package: "1.0")
    assert "JAX_PLATFORMS=gpu says why" in unused_accelerator("cpu", gpu)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS=cpu leaves it out" in unused_accelerator("cpu", tpu)
    assert unused_accelerator("gpu", gpu) == unused_accelerator("tpu", tpu) == ""
    assert unused_accelerator("cpu", tmp_path) == ""


def test_the_folder_of_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    (tmp_path / "step").write_bytes(bytes(3_000_000))
    found = by_name(folders())
    assert found["compiled steps"] == Finding("compiled steps", f"{tmp_path}, 3 MB")
    monkeypatch.setattr(seen, "LEAST_DISK", 2**80)
    assert "free some space" in by_name(folders())["disk"].fault
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/dev/null/x")
    (finding,) = folders()
    assert "Not a directory: every start compiles anew" in finding.fault
    assert "set JAX_COMPILATION_CACHE_DIR to a folder of yours" in finding.fault


def test_a_folder_of_compiled_steps_that_is_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/steps")
    (finding,) = folders()
    assert finding.value.startswith("gs://bucket/steps") and not finding.fault
    assert not list(tmp_path.iterdir())


def test_devices_of_this_machine(tmp_path: Path) -> None:
    found = by_name(devices(tmp_path))
    count = len(jax.devices())
    assert found["devices"] == Finding("devices", f"{count} x cpu (cpu)")
    has_library = not found["kernel of products"].value.startswith("xla")
    expected = "cpu" if has_library else "reference: "
    assert found["kernel of attention"].value.startswith(expected)


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_jax_that_does_not_start(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise kind("Unable to initialize backend 'tpu': it is in use\nat line 3")

    monkeypatch.setattr(jax, "devices", fail)
    (finding,) = devices()
    reason = "Unable to initialize backend 'tpu': it is in use"
    assert finding.fault == f"jax does not start: {reason}: end the other process"


@pytest.mark.parametrize(
    ("platforms", "advice"),
    [
        ("tpu", "unset JAX_PLATFORMS=tpu, or install what it names"),
        ("", "correct its driver and plugin, or set JAX_PLATFORMS=cpu to do without it"),
    ],
)
def test_what_to_do_where_jax_does_not_start(
    platforms: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(jax, "devices", fail)
    (finding,) = devices()
    assert finding.fault == f"jax does not start: no driver: {advice}"


def test_the_folder_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(constants.HF_HUB_CACHE)
    blob = folder / "models--a--b" / "blobs" / "1"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(300_000_000))
    (blob.parent / "link").symlink_to(blob)
    found = by_name(hub_folder())
    assert found["models of the hub"] == Finding("models of the hub", f"{folder}, 0.3 GB")
    assert not found["disk of models"].fault
    monkeypatch.setattr(seen, "LEAST_DISK", 2**80)
    assert "free some space, or set HF_HOME" in by_name(hub_folder())["disk of models"].fault


def test_a_folder_of_models_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/dev/null/x")
    (finding,) = hub_folder()
    assert finding.fault == (
        "Not a directory: no model can be fetched; set HF_HOME to a folder of yours"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (finding,) = hub_folder()
    assert finding.value.endswith("HF_HUB_OFFLINE: none is fetched") and not finding.fault


def test_huggingface_hub_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (finding,) = hub_folder()
    assert "cannot be fetched" in finding.value and "install jaxserve again" in finding.fault


def test_why_a_kernel_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: Any) -> str:
        logging.getLogger("jaxserve.engine").warning("attention 'gpu' is passed over: it is old")
        return "reference"

    monkeypatch.setattr("jaxserve.doctor.devices.choose_attention", choose)
    finding = by_name(kernels(jax.devices()[0]))["kernel of attention"]
    assert finding.value == "reference: attention 'gpu' is passed over: it is old"


def test_a_kernel_that_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: Any) -> str:
        raise KernelError("there is no kernel for this chip")

    monkeypatch.setattr("jaxserve.doctor.devices.choose_attention", choose)
    finding = by_name(kernels(jax.devices()[0]))["kernel of attention"]
    assert finding == Finding("kernel of attention", "none", "there is no kernel for this chip")


@pytest.fixture(autouse=True)
def no_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) in (0, 1)
    names = {finding["name"] for finding in json.loads(capsys.readouterr().out)}
    assert {"python", "jax", "processors", "memory", "compiled steps", "disk", "devices"} <= names
    assert {"huggingface-hub", "models of the hub", "disk of models"} <= names


def test_the_exit_code_and_the_line_of_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("disk", "1.0 GiB free", "free some space"), Finding("python", "3.12")]
    monkeypatch.setattr("jaxserve.doctor.__main__.seen_by_jax", lambda: iter(findings))
    assert main([]) == 1
    assert "FAULT  disk" in capsys.readouterr().out
    show(findings, Console(highlight=False, width=80))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "FAULT  disk    1.0 GiB free",
        "               free some space",
        "ok     python  3.12",
    ]


@pytest.mark.system
def test_jax_that_cannot_be_imported() -> None:
    script = (
        "import sys; sys.modules.update(jax=None)\n"
        "from jaxserve.doctor.__main__ import seen_by_jax; print(*seen_by_jax())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "cannot be imported" in done.stdout and "ModuleNotFoundError" in done.stdout
    assert "install jaxserve again, into a new environment" in done.stdout


@pytest.mark.system
def test_a_variable_that_jax_does_not_take() -> None:
    script = "from jaxserve.doctor.__main__ import seen_by_jax; print(*seen_by_jax())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"JAX_ENABLE_X64": "perhaps"},
        capture_output=True,
        text=True,
    )
    assert "cannot be imported" in done.stdout and "(correct or unset the variable)" in done.stdout


def test_findings_of_jax_are_those_of_the_devices() -> None:
    assert next(seen_by_jax()).name == "devices"
