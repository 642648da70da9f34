"""Requests whose process of their own does not start, since no more files may be opened."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import sandbox_process
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.server.grpc.test_messages import failure
from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.harness import Running, running

Ask = Callable[[Running], Any]  # returns the call


def chat(server: Running) -> Any:
    """Ask for an answer to a conversation, whose template a process renders."""
    message = inference_pb2.ChatMessage(role="user", content="hi")
    sampling = common_pb2.SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    return server.inference.Chat(inference_pb2.ChatRequest(messages=[message], sampling=sampling))


def grammar(server: Running) -> Any:
    """Ask for what a regular expression matches, which a process compiles first."""
    sampling = common_pb2.SamplingParams(max_tokens=3, seed=1, regex="[a-z]{9}")
    return server.inference.Generate(inference_pb2.GenerateRequest(text="x", sampling=sampling))


@pytest.mark.system
@pytest.mark.parametrize("ask", [chat, grammar], ids=["chat", "grammar"])
def test_it_is_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ask: Ask
) -> None:
    """That is no incident: the log has one line of it, and the client no path."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files: '/secret'")

    async def main() -> None:
        async with running(tmp_path) as server, undisturbed(server) as check:
            with monkeypatch.context() as patch:
                patch.setattr(sandbox_process.subprocess, "Popen", full)
                for _ in range(3):
                    call = ask(server)
                    assert await failure(call) == ("UNAVAILABLE", "HOST_EXHAUSTED")
                    trailers = dict(await call.trailing_metadata())
                    assert int(trailers["grpc-retry-pushback-ms"]) == 1000
                    assert "secret" not in await call.details()
                await check()
            refusals = [
                record.message for record in caplog.records if record.name.startswith("jaxserve")
            ]
            assert len(refusals) == 3 and all("request is refused" in each for each in refusals)
            assert "Traceback" not in caplog.text and "incident" not in caplog.text
            assert (await ask(server)).usage.completion_tokens == 3

    asyncio.run(main())
