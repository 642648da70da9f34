"""jaxserve client, called as a person would."""

import asyncio
import io
import json
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client.program import main as program
from jaxserve.server.security.auth import BearerTokens
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.client.test_client import TEXT, expected
from tests.jaxserve.server import harness
from tests.jaxserve.server.harness import Running, running

ROOT = Path(__file__).parents[3]
FLAGS = ["--temperature", "0", "--seed", "1", "--max-tokens", "8", "--ignore-eos"]
LONG = ["--temperature", "0", "--max-tokens", "400", "--ignore-eos"]
SLOW = 0.1  # seconds a step: LONG takes 40 s
Call = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]
Story = Callable[[Running, Call], Coroutine[Any, Any, None]]


@pytest.fixture
def tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs a story with a server, and with a way to call the program: exit code, standard output,
    standard error.
    """

    def run(story: Story, **config: Any) -> None:
        async def main() -> None:
            async with running(tmp_path, **config) as server:

                def called(arguments: tuple[str, ...]) -> int:
                    try:
                        return program(["--address", server.address, *arguments])
                    except SystemExit as stop:  # argparse
                        return int(stop.code or 0)

                async def call(*arguments: str) -> tuple[int, str, str]:
                    code = await asyncio.to_thread(called, arguments)
                    return code, *capsys.readouterr()

                await story(server, call)
                await server.at_rest()

        asyncio.run(main())

    return run


def test_text(tell: Callable[..., None]) -> None:
    async def story(server: Running, call: Call) -> None:
        assert await call(TEXT, *FLAGS) == (0, ByteTokenizer().decode(expected()) + "\n", "")

    tell(story)


@pytest.mark.system
def test_a_conversation_and_stats(tell: Callable[..., None]) -> None:
    async def story(server: Running, call: Call) -> None:
        began = time.monotonic()
        code, out, err = await call("hi", "--chat", "--system", "Be brief.", "--stats", *FLAGS)
        slowest = 8 / (time.monotonic() - began)
        rendered = list(b"system: Be brief.\nuser: hi\n")
        assert (code, out) == (0, ByteTokenizer().decode(expected(rendered)) + "\n")
        line = (
            rf"{len(rendered)} tokens in, 8 out \| TTFT [\d.]+ ms \| [\d.]+ ms per token \| "
            rf"\d+ tokens/s \| 0 cached\n"
        )
        assert re.fullmatch(line, err)
        rate = float(err.split(" | ")[3].split()[0])
        assert slowest - 1 < rate < 8 / 0.16  # eight steps

    tell(story, seconds=0.02)


def test_json(tell: Callable[..., None]) -> None:
    async def story(server: Running, call: Call) -> None:
        code, out, err = await call(TEXT, "--json", "--n", "2", "--logprobs", "0", *FLAGS)
        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert [tuple(choice["token_ids"]) for choice in answer["choices"]] == [
            expected(index=0),
            expected(index=1),
        ]
        assert (
            answer["usage"]["completion_tokens"] == 16
            and len(answer["choices"][1]["logprobs"]) == 8
        )
        assert {"request_id", "choices", "usage", "prompt_logprobs", "ignored"} == set(answer)

    tell(story)


@pytest.mark.system
def test_options_of_the_chat_template(
    tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "TEMPLATE", harness.TEMPLATE + "{{ tone }}{{ enable_thinking }}")
    given = ("--enable-thinking", "false", "--chat-template-kwargs", '{"tone": "dry"}')

    async def story(server: Running, call: Call) -> None:
        rendered = list(b"user: hi\ndryFalse")
        text = ByteTokenizer().decode(expected(rendered)) + "\n"
        assert await call("hi", "--chat", *given, *FLAGS) == (0, text, "")
        unread = ("--verbosity", "low", "--thinking-budget", "9")
        code, out, err = await call("hi", "--chat", *given, *unread, *FLAGS)
        assert (code, out) == (0, text)
        assert err == "without effect on this model: verbosity, thinking_budget\n"
        code, out, err = await call("hi", "--chat", "--json", *unread, *FLAGS)
        assert (code, err) == (0, "")
        assert json.loads(out)["ignored"] == ["verbosity", "thinking_budget"]

    tell(story)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--verbosity", "low"), "--verbosity is for a conversation (add --chat)"),
        (
            ("--chat-template-kwargs", "{}"),
            "--chat-template-kwargs is for a conversation (add --chat)",
        ),
        (
            ("--chat", "--thinking-budget", "0"),
            "--thinking-budget is 0; it must be between 1 and 2147483647",
        ),
        (
            ("--chat", "--chat-template-kwargs", '{"tools": []}'),
            "--chat-template-kwargs.tools is set by the server (leave it out)",
        ),
    ],
)
def test_wrong_options_of_the_chat_template(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["--address", "127.0.0.1:1", "hi", *arguments]) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")


def test_standard_input(tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(server: Running, call: Call) -> None:
        for arguments in ((), ("-",)):
            monkeypatch.setattr(
                sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode() + b"\n"), encoding="ascii")
            )
            assert await call(*arguments, *FLAGS) == (
                0,
                ByteTokenizer().decode(expected()) + "\n",
                "",
            )
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="ascii"))
        code, out, err = await call(*FLAGS)
        assert (code, out) == (2, "") and "UTF-8" in err

    tell(story)


def test_a_token_file(tell: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "token"
    empty = tmp_path / "empty"
    file.write_text("secret\n")
    empty.write_text("\n")

    async def story(server: Running, call: Call) -> None:
        assert (await call(TEXT, "--token-file", str(file), *FLAGS))[0] == 0
        for arguments, problem in (((), "token"), (("--token-file", str(empty)), "empty")):
            code, out, err = await call(TEXT, *arguments, *FLAGS)
            assert (
                (code, out) == (2, "")
                and problem in err
                and err.startswith("error: ")
                and err.count("\n") == 1
            )

    tell(story, tokens=BearerTokens(("secret",)))


WRONG = [
    (["--temperature", "3"], "temperature"),
    (["--n", "2"], "--json"),
    (["--logprobs", "1"], "--json"),
    (["--system", "x"], "--chat"),
    (["--timeout", "0"], "timeout"),
    (["--token-file", "/does/not/exist"], "--token-file"),
    (["--tls-ca", "/does/not/exist"], "/does/not/exist"),
    (["--tls-key", "/does/not/exist"], "certificate"),
    (["--stop-token-ids", "999"], "stop_token_ids"),  # says the server
    (["--timeout", "0.05", "--max-tokens", "400", "--ignore-eos"], "deadline"),
]


@pytest.mark.system
def test_what_cannot_be_done_is_one_line(tell: Callable[..., None]) -> None:
    async def story(server: Running, call: Call) -> None:
        for arguments, problem in WRONG:
            code, _, err = await call(TEXT, *arguments)
            assert (
                code == 2
                and problem in err.lower()
                and err.startswith("error: ")
                and err.count("\n") == 1
            ), err

    tell(story, seconds=0.01)


def test_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # that does not listen: nobody else can
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert program(["--address", address, TEXT]) == 2
    said = f"error: no server answers at {address}; start one: jaxserve serve\n"
    assert capsys.readouterr() == ("", said)


def test_an_aborted_answer_is_no_success(tell: Callable[..., None]) -> None:
    async def story(server: Running, call: Call) -> None:
        called = asyncio.create_task(call(TEXT, *LONG))
        while not (found := list(server.service._requests)) or not server.service.loads.running:
            await asyncio.sleep(0.01)
        assert server.service.abort(found[0])
        code, out, err = await called
        assert code == 2 and out.endswith("\n") and "aborted" in err

    tell(story, seconds=0.01)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children that Ctrl-C reaches, also where a shell started the tests with SIGINT ignored.

    A child inherits an ignored signal, while a handler becomes the default at exec.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@asynccontextmanager
async def started(server: Running) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program in a process of its own, which has printed the beginning of a long answer."""
    command = [sys.executable, "-m", "jaxserve.client", "--address", server.address, TEXT, *LONG]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout and process.stderr
        assert await process.stdout.read(1), await process.stderr.read()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.system
def test_ctrl_c(tell: Callable[..., None], interruptible: None) -> None:
    async def story(server: Running, call: Call) -> None:
        async with started(server) as process:
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            assert (process.returncode, err) == (130, b"")

    tell(story, seconds=SLOW)


@pytest.mark.system
def test_a_closed_pipe(tell: Callable[..., None]) -> None:
    async def story(server: Running, call: Call) -> None:
        async with started(server) as process:
            assert process.stdout and process.stderr
            process.stdout._transport.close()  # type: ignore[attr-defined]
            assert await process.stderr.read() == b"" and await process.wait() == 141

    tell(story, seconds=SLOW)
