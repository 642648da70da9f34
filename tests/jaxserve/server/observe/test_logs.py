"""Lines of a server's log about its load and its requests."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from rich.console import Console

from jaxserve.engine.engine_thread import Loads
from jaxserve.errors import QueueFullError
from jaxserve.server.observe.log import Format, RequestLog, configure
from jaxserve.server.observe.traffic_log import PERIOD, TrafficLog
from tests.jaxserve.server.http.harness import serving


@pytest.fixture(autouse=True)
def loggers_as_before() -> Any:
    names = ("jaxserve", "uvicorn.error", "opentelemetry", "huggingface_hub")
    before = [
        (log := logging.getLogger(name), log.handlers, log.level, log.propagate) for name in names
    ]
    stderr = sys.stderr
    hook = sys.excepthook
    yield
    sys.stderr = stderr
    sys.excepthook = hook
    for log, handlers, level, propagate in before:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


class Later:
    """An event loop's call_later, whose calls the test makes."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, call: Callable[[], None]) -> None:
        self.calls.append((seconds, call))

    def pass_by(self) -> None:
        [(seconds, call)] = self.calls
        assert seconds == PERIOD
        self.calls.clear()
        call()


def step(**loads: int) -> Any:
    return SimpleNamespace(loads=Loads(**loads))


def answer(prompt_tokens: int, cached: int, admitted: bool = True) -> Any:
    times = SimpleNamespace(admitted=admitted, cached=cached)
    return SimpleNamespace(prompt_tokens=prompt_tokens, times=times)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_every_ten_seconds_with_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "info")
    later = Later()
    log = TrafficLog(later)
    assert later.calls == []  # nothing is awaited without traffic
    log.stepped(step(running=1, waiting=0, pages_used=1, pages_total=100))
    log.received(answer(0, 0), 19_000, first=True, seconds=1)
    log.received(answer(0, 0), 300, first=False, seconds=1)
    log.ended(answer(100, 60), None)
    log.ended(answer(100, 48), None)
    log.ended(answer(100, 0, admitted=False), None)
    log.stepped(step(running=12, waiting=3, pages_used=41, pages_total=100))
    later.pass_by()
    (line,) = lines(capsys)
    assert line.endswith("INFO running 12 waiting 3 cache 41 % 1,930 tok/s hits 54 %")
    assert later.calls == []
    log.stepped(step(running=0, pages_total=100))
    log.received(answer(0, 0), 10, first=False, seconds=1)
    later.pass_by()
    (line,) = lines(capsys)
    assert line.endswith("INFO running 0 waiting 0 cache 0 % 1 tok/s")


@pytest.mark.parametrize(
    ("level", "logs_requests", "shown"),
    [("info", False, False), ("debug", False, True), ("info", True, True)],
)
def test_a_line_per_request_is_asked_for(
    capsys: pytest.CaptureFixture[str], level: str, logs_requests: bool, shown: bool
) -> None:
    configure("json", level)
    log = RequestLog(logging.INFO if logs_requests else logging.DEBUG)
    log.refused(None, QueueFullError("full", 1.0))  # type: ignore[arg-type]
    entries = [json.loads(line) for line in lines(capsys)]
    assert [entry["reason"] for entry in entries] == ["QUEUE_FULL"] * shown


def test_all_that_is_written_to_standard_error_becomes_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever the level, in whole lines, and each thread's lines for themselves."""
    configure("json", "error")
    print("engine   16 rows", "balanced", sep=", ", file=sys.stderr)
    print("error: --port is 1; it is taken\n\nat", file=sys.stderr, end=" ")
    other = threading.Thread(target=lambda: print("of another thread", file=sys.stderr))
    other.start()
    other.join()
    print("the end", file=sys.stderr, end="", flush=True)
    Console(stderr=True).print("ready: gRPC [::1]:8000", soft_wrap=True, markup=False)
    found = [json.loads(line) for line in lines(capsys)]
    assert [(entry["level"], entry["message"]) for entry in found] == [
        ("info", "engine   16 rows, balanced"),
        ("error", "--port is 1; it is taken"),
        ("info", "of another thread"),
        ("info", "at the end"),
        ("info", "ready: gRPC [::1]:8000"),
    ]
    assert all(entry["time"].endswith("Z") and entry["logger"] for entry in found)


def test_the_end_of_a_program_is_one_record(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "info")
    try:
        raise ValueError("odd")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    (entry,) = [json.loads(line) for line in lines(capsys)]
    assert entry["level"] == "critical" and entry["exception"].endswith("ValueError: odd")


FORGED = ["a\r\nERROR b", "a\x1b[31mb", "a reason=b"]
OBEYED_BY_TERMINALS = ["a\u2028b", "a\u202eb", "a\x85b", "a\x9b31mb", "a\x7fb", "a\U000e0001b"]
NAMES = FORGED + OBEYED_BY_TERMINALS


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_clients_name_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: Format
) -> None:
    """Each of their requests is one line, which a terminal shows as it is."""
    configure(format, "debug")

    async def main() -> None:
        async with serving(tmp_path, observers=(RequestLog(logging.INFO),)) as http:
            canary = await http.canary()
            for name in NAMES:
                body = {"prompt": "x", "max_tokens": 1}
                own_id = body | {"request_id": name}
                assert (await http.post("/v1/completions", own_id)).status_code == 200
                for bad in ({"model": name}, {name: 1}, {"prompt": "x" * 600}):
                    answer = await http.post("/v1/completions", own_id | bad)
                    assert answer.status_code in (400, 404)
                assert (await http.raw.get("/" + quote(name))).status_code == 404
            assert await http.canary() == canary
            await http.server.at_rest()

    asyncio.run(main())
    written = capsys.readouterr().err
    found = written.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in found)
    assert len(found) == 2 + 2 * len(NAMES)  # canaries; those that end, and prompts that are long
    if format == "json":
        ids = [entry["request_id"] for line in found if "request_id" in (entry := json.loads(line))]
    else:
        ids = [unquoted(line) for line in found if " request_id=" in line]
    assert ids == ["canary", *NAMES, "canary"]


def unquoted(line: str) -> str:
    """Return the request id of a line of text."""
    rest = line.partition(" request_id=")[2]
    return json.JSONDecoder().raw_decode(rest)[0] if rest[0] == '"' else rest.partition(" ")[0]


SCRIPT = """
import logging, sys
from jaxserve.server.observe.log import configure
configure("json", "info")
for _ in range(3):
    logging.getLogger("jaxserve.serve").info("caf\u00e9 \U0001f600")
    print("said", file=sys.stderr, flush=True)
print("went on")
"""


@pytest.mark.system
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_a_log_that_cannot_be_written_ends_nothing(where: str) -> None:
    command = f"{sys.executable} - {where}"
    done = subprocess.run(["sh", "-c", command], input=SCRIPT, capture_output=True, text=True)
    assert done.stdout.endswith("went on\n")  # print() without standard error prints there, too


@pytest.mark.system
def test_lines_are_utf_8_in_any_locale() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True)
    entries = [json.loads(line) for line in done.stderr.decode("utf-8").splitlines()]
    assert [entry["message"] for entry in entries] == ["caf\u00e9 \U0001f600", "said"] * 3
