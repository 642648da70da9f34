"""Actions over gRPC, with the client that jaxserve has."""

import json
import random
from typing import Any
from uuid import uuid4

from grpc import aio  # type: ignore[attr-defined]

from benchmarks.soak.outcomes import UnexpectedError
from benchmarks.soak.target import Action, Target
from benchmarks.soak.texts import TEXTS, messages, schema, tools
from jaxserve.client.results import Event, Finish
from jaxserve.structure import Structure
from jaxserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc

# Channels to one address share a connection otherwise.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def whole(target: Target, dice: random.Random) -> None:
    await target.grpc.generate(
        dice.choice(TEXTS), max_tokens=dice.randint(1, 40), logprobs=dice.choice([None, 3])
    )


async def stream(target: Target, dice: random.Random) -> None:
    last: Event | None = None
    async with target.grpc.stream(dice.choice(TEXTS), max_tokens=60) as events:
        async for event in events:
            last = event
    if not isinstance(last, Finish):
        raise UnexpectedError("stream without Finish", repr(last))


async def left_early(target: Target, dice: random.Random) -> None:
    leave = dice.randint(1, 20)
    async with target.grpc.stream(dice.choice(TEXTS), max_tokens=200, ignore_eos=True) as events:
        async for _ in events:
            leave -= 1
            if not leave:
                return


async def four(target: Target, dice: random.Random) -> None:
    await target.grpc.generate(dice.choice(TEXTS), max_tokens=20, n=4, stop=["the"])


async def chat(target: Target, dice: random.Random) -> None:
    await target.grpc.chat(messages(dice), max_tokens=20)


async def required_calls(target: Target, dice: random.Random) -> None:
    offered = tools(dice)
    asked: dict[str, Any] = dice.choice(
        ({"tool_choice": "required"}, {"tool_name": offered[0]["name"]})
    )
    result = await target.grpc.chat(
        messages(dice), tools=offered, max_tokens=120, parallel_tool_calls=False, **asked
    )
    (choice,) = result.choices
    if choice.finish_reason == "tool_calls":
        json.loads(choice.tool_calls[0].arguments)
        target.outcomes.checked["tool calls over gRPC"] += 1
    elif choice.finish_reason != "length":
        raise UnexpectedError(f"required call, finish {choice.finish_reason}", choice.text)


async def grammar(target: Target, dice: random.Random) -> None:
    structure = Structure.of("json_schema", schema(dice))
    result = await target.grpc.generate(dice.choice(TEXTS), max_tokens=120, structure=structure)
    (choice,) = result.choices
    if choice.finish_reason == "stop":
        json.loads(choice.text)
        target.outcomes.checked["texts of grammars over gRPC"] += 1


async def aborted(target: Target, dice: random.Random) -> None:
    id = f"aborted-{uuid4()}"
    last: Event | None = None
    stream = target.grpc.stream(dice.choice(TEXTS), max_tokens=300, ignore_eos=True, request_id=id)
    async with stream as events:
        async for event in events:
            if last is None:
                await target.grpc.abort([id])
            last = event
    # It may have ended before it was aborted.
    reason = last.choices[0].finish_reason if isinstance(last, Finish) else "none"
    if reason not in ("abort", "length"):
        raise UnexpectedError(f"aborted stream, finish {reason}", repr(last))


async def score(target: Target, dice: random.Random) -> None:
    await target.grpc.score(dice.choice(TEXTS), top_logprobs=dice.randint(0, 3))


async def too_late(target: Target, dice: random.Random) -> None:
    call = target.grpc.generate(
        dice.choice(TEXTS), max_tokens=300, ignore_eos=True, timeout=dice.uniform(0.01, 0.2)
    )
    # RESOURCE_EXHAUSTED: the queue is longer than the deadline.
    await target.outcomes.refusal(call, "OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")


async def invalid(target: Target, dice: random.Random) -> None:
    call = target.grpc.generate("x" * 20_000, max_tokens=dice.randint(1, 4))
    await target.outcomes.refusal(call, "INVALID_ARGUMENT")
    await target.outcomes.refusal(target.grpc.embed(["a"]), "UNIMPLEMENTED")


async def new_channel(target: Target, dice: random.Random) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=dice.randint(1, 8))
    request = inference_pb2.GenerateRequest(text=dice.choice(TEXTS), sampling=sampling)
    async with aio.insecure_channel(target.address, options=OWN_CONNECTION) as channel:
        await inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)


ACTIONS: tuple[Action, ...] = (
    whole,
    stream,
    left_early,
    four,
    chat,
    required_calls,
    grammar,
    aborted,
    score,
    too_late,
    invalid,
    new_channel,
)
