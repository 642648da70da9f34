"""CPU seconds of the tests by folder, held against committed figures.

Processors differ, so seconds are divided by those of a fixed piece of work that every worker does
in the same run. The committed ratios lie in `cpu_budget.toml`, one column for a run that begins
with an empty compilation cache and one for a run that finds it filled. `--cpu-budget FILE` prints
seconds and ratios; with `--enforce-cpu-budget` a run ends red where a folder takes more than its
committed ratio allows; `--write-cpu-budget` writes the column of the run that was just made.
"""

import os
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

TOLERANCE = 1.25
SECONDS = "cpu_seconds"  # name of the property that a test's report carries
REFERENCE = "cpu_seconds_of_reference"
SMALL = 5.0  # folders with a smaller ratio in the file are not compared: noise


def reference_seconds() -> float:
    """CPU seconds of work like that of the tests: interpreted Python, and compiles by XLA."""
    began = cpu_seconds()
    total = 0
    for number in range(3_000_000):
        total += number % 7
    with compiling_anew():
        for layers in range(4, 8):
            jax.jit(_layers, static_argnums=1).lower(jnp.zeros((8, 64)), layers).compile()
    return cpu_seconds() - began


@contextmanager
def compiling_anew() -> Iterator[None]:
    """Switch the compilation cache off. jax asks once whether there is one, hence the resets."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def _layers(x: jax.Array, layers: int) -> jax.Array:
    """A chain of products and norms of [8, 64] float32, too small to take time itself."""
    weight = np.eye(64, dtype=np.float32)
    for layer in range(layers):
        x = jnp.tanh(x @ (weight * np.float32(layer + 1)))
        x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
        x = jnp.where(x > 0, jnp.cumsum(x, axis=-1), jnp.sort(x, axis=-1))
    return x


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def folder_of(nodeid: str) -> str:
    """The part of the tests that a test belongs to: at most three folders deep."""
    folders = nodeid.split("::")[0].split("/")[:-1]
    return "/".join(folders[:3])


class CpuBudget:
    """Collects the CPU seconds of every test, and compares their sums with the committed ratios."""

    def __init__(self, file: Path, cache: Path, write: bool, enforce: bool):
        self._file = file
        self._write = write
        self._enforce = enforce
        self._column = "warm" if cache.is_dir() and any(cache.iterdir()) else "empty"
        self._seconds = Counter[str]()
        self._references: list[float] = []
        self._began = time.monotonic()
        self._over: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[folder_of(report.nodeid)] += dict(report.user_properties).get(SECONDS, 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take the reference of a worker of pytest-xdist that has ended."""
        if reference := getattr(node, "workeroutput", {}).get(REFERENCE):
            self._references.append(reference)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._references:  # no workers: the tests ran in this process
            self._references.append(reference_seconds())
        if self._write:
            self._write_column()
        self._over = list(self._exceeded())
        if self._enforce and self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        out = terminalreporter
        out.section(f"CPU seconds by folder, {self._column} compilation cache")
        committed = self._committed()
        for folder, seconds in sorted(self._seconds.items(), key=lambda entry: -entry[1]):
            known = committed.get(folder)
            limit = f"{known:8.1f}" if known is not None else "       -"
            out.line(
                f"{seconds:9.1f} s  ratio {self._ratio(folder):8.1f}  committed {limit}  {folder}"
            )
        elapsed = time.monotonic() - self._began
        out.line(f"{sum(self._seconds.values()):9.1f} s in all, {elapsed:.0f} s by the clock")
        out.line(f"{self._reference():9.2f} s of the reference are 1.0")
        for line in self._over:
            out.line(line, red=True)

    def _reference(self) -> float:
        return sum(self._references) / len(self._references)

    def _ratio(self, folder: str) -> float:
        return self._seconds[folder] / self._reference()

    def _committed(self) -> dict[str, float]:
        return self._all_columns().get(self._column, {})

    def _all_columns(self) -> dict[str, dict[str, float]]:
        return tomllib.loads(self._file.read_text()) if self._file.exists() else {}

    def _exceeded(self) -> Iterator[str]:
        committed = self._committed()
        if not committed:
            yield f"{self._file} has no ratios for this run: add --write-cpu-budget to write them"
        for folder, known in committed.items():
            ratio = self._ratio(folder)
            if ratio > max(known, SMALL) * TOLERANCE:
                yield (
                    f"{folder}: {ratio:.1f} times the reference; {known:.1f} are committed and "
                    f"{TOLERANCE:g} times that is the limit (make room, or run with "
                    "--write-cpu-budget and say why in the commit)"
                )

    def _write_column(self) -> None:
        columns = self._all_columns()
        columns[self._column] = {f: round(self._ratio(f), 1) for f in sorted(self._seconds)}
        text = "# CPU seconds by folder over those of the reference (tests/cpu_budget.py)\n"
        for name, ratios in sorted(columns.items()):
            rows = "".join(f'"{folder}" = {ratio}\n' for folder, ratio in ratios.items())
            text += f"\n[{name}]\n{rows}"
        self._file.write_text(text)


class CpuMeter:
    """Notes the CPU seconds of each test in its report, in every process that runs tests."""

    def __init__(self) -> None:
        self._last = cpu_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._last = cpu_seconds()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        outcome = yield
        if call.when == "teardown":
            now = cpu_seconds()
            outcome.get_result().user_properties.append((SECONDS, now - self._last))  # type: ignore[attr-defined]
            self._last = now

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[REFERENCE] = reference_seconds()
