"""Streamed pieces join to the unary text, whatever the bytes and wherever they are cut."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.server.harness import Running, running

TEXT = "A 👩‍👩‍👧 family, e\u0301 and \u1100\u1161, 日本語 and 🙂🙃; an end."
DATA = TEXT.encode()


def speak(server: Running, data: bytes) -> None:
    """Let the device answer with these bytes, a token each, whatever it computes."""
    collect = server.runner.collect
    said = Counter[int]()

    def scripted(plan: StepPlan, handle: StepOutput) -> StepOutput:
        output = collect(plan, handle)
        for lane, result in zip(plan.lanes, output.lanes, strict=True):
            for i, sequence in enumerate(lane.sequences):
                first = said[sequence]
                result.tokens[i] = [
                    data[(first + n) % len(data)] for n in range(len(result.tokens[i]))
                ]
                said[sequence] += len(result.tokens[i])
        return output

    server.runner.collect = scripted  # type: ignore[method-assign]


async def both(server: Running, **sampling: Any) -> tuple[str, list[str], common_pb2.ChoiceFinish]:
    """Return the unary text, the streamed pieces, and the end, which must be the same in both."""
    params = common_pb2.SamplingParams(seed=1, ignore_eos=True, **sampling)
    whole = await server.inference.Generate(
        inference_pb2.GenerateRequest(text="x", sampling=params)
    )
    request = inference_pb2.GenerateStreamRequest(text="x", sampling=params)
    events = [event async for event in server.inference.GenerateStream(request)]
    pieces = [event.delta.text for event in events[1:-1]]
    (choice,), (finish,) = whole.choices, events[-1].finish_info.choices
    streamed = [token for event in events[1:-1] for token in event.delta.token_ids]
    assert streamed == list(choice.token_ids)
    for one in (finish, choice.finish):
        one.ClearField("timings")
    assert finish == choice.finish
    return choice.text, pieces, finish


def test_every_cut(tmp_path: Path) -> None:
    """A character that max_tokens cuts becomes U+FFFD, and no piece has half of a character."""

    async def main() -> None:
        async with running(tmp_path, prefix_cache=False) as server:
            speak(server, DATA)
            for length in range(1, len(DATA) + 1):
                text, pieces, finish = await both(server, max_tokens=length)
                assert text == "".join(pieces) == DATA[:length].decode("utf-8", "replace")
                assert finish.reason == common_pb2.FINISH_REASON_LENGTH
                assert all("\ufffd" not in piece for piece in pieces[:-1])
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["👧", "\u0301", "日本語 and", "; an end.", "not there", "n"])
def test_every_stop_string(tmp_path: Path, stop: str, include: bool) -> None:
    async def main() -> None:
        async with running(tmp_path, prefix_cache=False, decode_steps=4) as server:
            speak(server, DATA)
            text, pieces, finish = await both(
                server, max_tokens=len(DATA), stop=[stop, "zzz"], include_stop=include
            )
            at = TEXT.find(stop)
            expected = TEXT if at < 0 else TEXT[: at + len(stop)] if include else TEXT[:at]
            assert text == "".join(pieces) == expected
            if at >= 0:
                assert (finish.reason, finish.stop_string) == (common_pb2.FINISH_REASON_STOP, stop)
            await server.at_rest()

    asyncio.run(main())
