"""jaxserve serve as a process, with signals and with clients of other projects."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.client import CallError, Client
from jaxserve.errors import JaxserveError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.compute_priority import NICENESS
from tests.compiled_steps import compiled_steps_folder

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[3]
DRAFT = ROOT / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL = ["--max-batch", "2", "--step-tokens", "64", "--max-context", "512", "--dtype", "float32"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Process:
    popen: "subprocess.Popen[str]"
    grpc: str
    http: str
    lines: list[str]
    reader: threading.Thread

    def client(self) -> Client:
        """Return a client once the server is ready."""
        client = Client(self.grpc)
        while True:
            assert self.popen.poll() is None, "".join(self.lines)
            with contextlib.suppress(JaxserveError):
                client.wait_ready(timeout=2)
                return client

    def logged(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first such entry of the log; it may come after the answer that it is about."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for line in list(self.lines):
                if line.startswith("{") and wanted(entry := json.loads(line)):
                    return entry
            time.sleep(0.05)
        raise AssertionError("".join(self.lines))

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return the exit code, and everything that was written."""
        try:
            code = self.popen.wait(120)
        finally:
            self.popen.kill()
            self.popen.wait()
            self.reader.join()
            assert self.popen.stderr
            self.popen.stderr.close()
        return code, "".join(self.lines)


# A server whose background compiles never end.
HANGING_COMPILES = """
import sys, threading, time
from jaxserve import serve
from jaxserve.engine.device.step_compiler import StepCompiler

step = StepCompiler.step

def compile(self, bucket):
    if threading.current_thread().name == "compile":
        time.sleep(3600)
    return step(self, bucket)

StepCompiler.step = compile
sys.exit(serve.main())
"""


def launch(
    *flags: str, ports: tuple[int, int] | None = None, program: str | None = None
) -> Process:
    """Start a server, which is ready when all is compiled: answers are compared bit by bit.

    Args:
        ports: Ports of gRPC and HTTP, as of a server that it replaces.
        program: Program to run instead of serve, with its flags.
    """
    port, http = ports or (free_port(), free_port())
    cache = compiled_steps_folder()
    run = ["-c", program] if program else ["-m", "jaxserve.serve"]
    command = [sys.executable, *run, "--port", str(port)]
    command += ["--http-port", str(http), "--compilation-cache", str(cache)]
    command += ["--ready-when", "all", *SMALL, *flags]
    if not flags or flags[0].startswith("-"):  # no model
        command += ["--model", str(DRAFT)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    popen = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, env=environment)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(popen.stderr or ()), daemon=True)
    reader.start()
    return Process(popen, f"127.0.0.1:{port}", f"http://127.0.0.1:{http}", lines, reader)


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    """Start a process that is ready; SIGTERM ends it with 0 and leaves no child behind."""
    process = launch("--log-format", "json", "--log-requests")
    try:
        process.client().close()
        yield process
    finally:
        children = children_of(process.popen.pid)
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
        assert code == 0, text
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def children_of(pid: int) -> list[int]:
    """Return the ids of the processes that any thread of a process has started and that run."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in lists for child in file.read_text().split()]


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read()


def buf(server: Process, method: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of `buf curl`, which learns the messages by reflection."""
    command = [
        str(Path(sys.executable).parent / "buf"),
        "curl",
        "--http2-prior-knowledge",
        "--protocol",
        "grpc",
    ]
    url = f"http://{server.grpc}/jaxserve.v1.{method}"
    done = subprocess.run(
        [*command, "-d", json.dumps(message), url], capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    found = []
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def test_every_client_gets_the_same_text(server: Process) -> None:
    with server.client() as client:
        expected = client.generate("Once upon a time", temperature=0, max_tokens=24, logprobs=2)
    text = expected.choices[0].text
    assert len(text) > 20
    sampling = {"temperature": 0, "maxTokens": 24}
    (unary,) = buf(
        server, "InferenceService/Generate", {"text": "Once upon a time", "sampling": sampling}
    )
    assert unary["choices"][0]["text"] == text
    events = buf(
        server,
        "InferenceService/GenerateStream",
        {"text": "Once upon a time", "sampling": sampling},
    )
    assert "promptInfo" in events[0] and "finishInfo" in events[-1]
    assert "".join(event.get("delta", {}).get("text", "") for event in events) == text
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="-", max_retries=0, timeout=60) as sdk:
        completion = sdk.completions.create(
            model="tiny-chat-draft",
            prompt="Once upon a time",
            temperature=0,
            max_tokens=24,
            logprobs=2,
        )
        assert completion.choices[0].text == text
        pieces = sdk.completions.create(
            model="tiny-chat-draft",
            prompt="Once upon a time",
            temperature=0,
            max_tokens=24,
            stream=True,
        )
        assert "".join(piece.choices[0].text for piece in pieces) == text
        chat = sdk.chat.completions.create(
            model="tiny-chat-draft",
            messages=[{"role": "user", "content": "What is 7 plus 5?"}],
            temperature=0,
            max_tokens=16,
        )
    with server.client() as client:
        answer = client.chat(
            [{"role": "user", "content": "What is 7 plus 5?"}], temperature=0, max_tokens=16
        )
    assert chat.choices[0].message.content == answer.choices[0].text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_the_computation_goes_behind_clients(server: Process) -> None:
    pid = server.popen.pid
    niceness = {
        (folder / "comm").read_text().strip(): os.getpriority(os.PRIO_PROCESS, int(folder.name))
        for folder in Path(f"/proc/{pid}/task").glob("*")
        if folder.exists()
    }
    own = os.getpriority(os.PRIO_PROCESS, pid)
    assert niceness["tf_XLAEigen"] == min(own + NICENESS, 19)


def test_metrics_and_nothing_compiled_while_serving(server: Process) -> None:
    with server.client() as client:
        client.generate(
            "x",
            max_tokens=8,
            n=2,
            logprobs=3,
            prompt_logprobs=2,
            logit_bias={5: 1.0},
            repetition_penalty=1.2,
        )
        assert client.server_info().compiles_after_ready == 0
    metrics = get(f"{server.http}/metrics").decode()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["jaxserve:generation_tokens_total"]) >= 16
    assert float(values["jaxserve:time_to_first_token_seconds_count"]) >= 1
    assert float(values["jaxserve:compiles_after_ready"]) == 0
    assert get(f"{server.http}/health")


def test_logs_are_json_and_without_prompts(server: Process) -> None:
    secret = "quiet zebras"
    with server.client() as client:
        client.generate(secret, max_tokens=2, request_id="logged")
        with pytest.raises(JaxserveError):
            client.generate(secret * 200, max_tokens=2)
    entry = server.logged(lambda entry: entry.get("request_id") == "logged")
    assert entry["completion_tokens"] == 2
    server.logged(lambda entry: entry["message"] == "refused")
    assert not any("zebra" in line for line in server.lines)


def test_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DRAFT, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 2], "top_k": 1}')
    process = launch(str(folder))
    try:
        with process.client() as client:
            ask = partial(client.generate, "Once upon a time", max_tokens=24)
            greedy = ask(temperature=0).choices[0].text
            assert all(ask(seed=seed).choices[0].text == greedy for seed in range(3))
            others = [ask(SamplingParams(seed=seed)).choices[0].text for seed in range(3)]
            assert others != [greedy] * 3, "SamplingParams says that top_k is 0"
            body = {"model": "model", "prompt": "Once upon a time", "max_tokens": 24}
            with openai.OpenAI(base_url=f"{process.http}/v1", api_key="none") as http:
                assert http.completions.create(**body).choices[0].text == greedy
    finally:
        process.popen.send_signal(signal.SIGTERM)
        process.wait()


def test_sigterm_lets_a_stream_finish() -> None:
    process = launch("--drain-timeout", "600")
    with process.client() as client:
        pieces = []
        with client.stream(
            "Once upon a time", max_tokens=300, ignore_eos=True, temperature=0
        ) as stream:
            for event in stream:
                if not pieces:
                    process.popen.send_signal(signal.SIGTERM)
                pieces.append(event)
        assert pieces[-1].usage.completion_tokens == 300  # type: ignore[union-attr]
    code, text = process.wait()
    assert code == 0 and "draining after SIGTERM" in text and "ready: gRPC" in text


def test_a_second_signal_ends_it_at_once() -> None:
    process = launch()
    sent = 0
    with (
        process.client() as client,
        pytest.raises(CallError),
        client.stream("x", max_tokens=500, ignore_eos=True, n=16) as stream,
    ):
        for _ in stream:
            drains = any("draining after SIGTERM" in line for line in process.lines)
            if sent == drains:  # a second one would be lost while the first is pending
                process.popen.send_signal(signal.SIGTERM)
                sent += 1
    assert process.wait()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "flags, message",
    [
        (["/nowhere"], "/nowhere"),
        (["--host", "256.1.1.1"], "--host is 256.1.1.1; it is no"),
        (["--token-file", "/nowhere"], "--token-file is /nowhere; it cannot be read: No such file"),
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key go together"),
        (["--max-batch", "0"], "--max-batch is 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(flags: list[str], message: str) -> None:
    process = launch(*flags)
    code, text = process.wait()
    assert code == 2
    assert [line for line in text.splitlines() if line.startswith("error: ")][-1].find(
        message
    ) > 0, text
    assert "Traceback" not in text and "ERROR" not in text


def values_of(server: Process) -> dict[str, float]:
    """Return the metrics without labels, by name without the prefix."""
    text = get(f"{server.http}/metrics").decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("jaxserve:"): float(value) for name, value in lines}


def test_requests_are_answered_while_steps_come(tmp_path: Path) -> None:
    """No request waits for a compile, and no text differs."""
    process = launch("--ready-when", "first", "--compilation-cache", str(tmp_path))
    try:
        with process.client() as client:
            pending = values_of(process)["buckets_pending"]
            ask = partial(client.generate, "Once upon a time", temperature=0, max_tokens=24)
            expected = ask()
            while client.server_info().buckets_pending:
                assert ask().choices[0].text == expected.choices[0].text
                time.sleep(0.2)  # in which the cores compile
            info = client.server_info()
            assert ask().choices[0].text == expected.choices[0].text
        # Of 2 rows and 64 tokens: decode[1], and prompts of 16 and 32 tokens.
        assert 0 < pending <= info.background_compiles == 3 and info.compiles_after_ready == 0
        values = values_of(process)
        assert values["background_compiles"] == 3 and values["buckets_pending"] == 0
        assert values["compiles_after_ready"] == 0
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
    assert code == 0 and "3 of 6 steps compiled" in text and "\n6 steps compiled" in text, text


def test_a_server_that_is_ready_when_all_is_compiled() -> None:
    process = launch("--ready-when", "all")
    try:
        with process.client() as client:
            info = client.server_info()
            assert (info.buckets_pending, info.background_compiles) == (0, 0)
            assert client.generate("x", max_tokens=4).choices
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
    assert code == 0 and "\n6 steps compiled" in text, text


def test_the_end_waits_for_no_compile() -> None:
    """A compile cannot be interrupted, and takes a minute for a large model."""
    process = launch("--ready-when", "first", program=HANGING_COMPILES)
    try:
        with process.client() as client:
            assert client.generate("x", max_tokens=4).choices
            assert client.server_info().buckets_pending == 3
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
    assert code == 0, text


@pytest.mark.slow
def test_a_start_after_one_that_was_killed_and_with_damaged_steps(tmp_path: Path) -> None:
    """It goes on, and says so in a line."""
    killed = launch("--ready-when", "first", "--compilation-cache", str(tmp_path))
    killed.client().close()
    killed.popen.kill()  # while it compiles, and perhaps writes
    killed.wait()
    entries = list(tmp_path.glob("*-cache"))
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    process = launch(
        "--ready-when", "first", "--compilation-cache", str(tmp_path), program=HANGING_COMPILES
    )
    try:
        with process.client() as client:
            assert client.generate("x", max_tokens=4).choices
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
    assert entries and code == 0, text
    (line,) = (line for line in text.splitlines() if "damaged" in line)
    assert line.startswith("kept steps are damaged, and compiled anew at each start until their")
    assert "Warning" not in text
