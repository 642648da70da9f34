"""Ctrl-C at any moment of the first seconds of any command: 130, no traceback, never lost.

Origins: vllm-project/vllm#31527 and #39854, servers that Ctrl-C does not end while they start. 130
is what shells report of a program that SIGINT ended (POSIX, 2.8.2 Exit Status).
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryFile

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[3]
MODEL = ROOT / "checkpoints" / "bundled" / "tiny-chat"
SECONDS = 3.0
# Seconds from one moment to the next.
STEPS = (0.25, pytest.param(0.02, marks=pytest.mark.slow))
AT_ONCE = 3  # processes that run beside each other
COMMANDS = (
    "-m jaxserve generate MODEL --prompt text --max-tokens 500",
    "-m jaxserve.generate MODEL --prompt text --max-tokens 500",
    "-m jaxserve serve MODEL --port 0 --http-port 0 --drain-timeout 1",
    "-m jaxserve.serve MODEL --port 0 --http-port 0 --drain-timeout 1",
    "-m jaxserve client --address SILENT text",
    "-m jaxserve.client --address SILENT text",
    "-m jaxserve bench offline --model MODEL",
    "-m jaxserve.bench startup --model MODEL",
    "-m jaxserve.bench serve --target grpc://SILENT",
    "-m jaxserve plan MODEL --topology cpu",
    "-m jaxserve.plan MODEL --topology cpu",
    "-m jaxserve convert MODEL TARGET",
    "-m jaxserve.convert MODEL TARGET",
    "-m jaxserve.doctor",
    "-m checkpoints.convert MODEL TARGET",
)


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """Children that Ctrl-C reaches, also where a shell started the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def silent() -> Iterator[str]:
    """Address of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def is_of_python_s_start(traceback: str) -> bool:
    """Return whether Ctrl-C came before a program could have installed its handler.

    The last line of this project in the traceback is that of a package's __init__.py, or one before
    the handler is installed, or there is none.
    """
    places = re.findall(rf'File "({ROOT}/[^"]+)", line (\d+)', traceback)
    own = [(Path(path), int(line)) for path, line in places if ".venv" not in path]
    if not own:
        return True
    path, line = own[-1]
    before = path.read_text().splitlines()[: line - 1]
    is_package = path.name in ("__init__.py", "sigint.py")
    return is_package or not any("exit_on_interrupt()" in each for each in before)


def fault_of(words: list[str], after: float) -> str:
    """Interrupt a command; return what is wrong with its end, "" if nothing is."""
    with TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(after)
        written = os.fstat(output.fileno()).st_size
        ended = process.poll() is not None  # before it was interrupted
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"it goes on: {process.communicate()[1]}"
        went_on = os.fstat(output.fileno()).st_size > written
    if "Exception ignored" in said or ("Traceback" in said and not is_of_python_s_start(said)):
        return said
    if "Traceback" in said:
        return ""
    # A process without a handler yet dies of the signal itself, which shells report as 130 as well.
    expected = [130, -signal.SIGINT]
    if written and not went_on:  # it had done everything, and was about to end
        expected.append(0)
    return "" if ended or process.returncode in expected else f"{process.returncode}: {said}"


@pytest.mark.parametrize("step", STEPS)
def test_ctrl_c_at_any_moment_of_any_command(step: float, silent: str, tmp_path: Path) -> None:
    """Every 100 or 20 ms of the first three seconds, each at a command after the other."""
    jobs = []
    for number, command in zip(range(round(SECONDS / step)), cycle(COMMANDS), strict=False):
        places = {"MODEL": str(MODEL), "SILENT": silent, "TARGET": str(tmp_path / str(number))}
        for name, place in places.items():
            command = command.replace(name, place)
        jobs.append((command.split(), step * number))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        faults = list(pool.map(lambda job: fault_of(*job), jobs))
    found = zip(jobs, faults, strict=True)
    wrong = [f"{words} after {at:.2f} s: {fault}" for (words, at), fault in found if fault]
    assert not wrong, "\n".join(wrong)
    left = [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()]
    assert not left, "an unfinished folder of a conversion"
