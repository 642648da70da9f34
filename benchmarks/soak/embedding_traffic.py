"""Actions for the server that embeds, over gRPC and HTTP."""

import asyncio
import random
from base64 import b64decode
from typing import Any

from benchmarks.soak.http_calls import check, post
from benchmarks.soak.outcomes import UnexpectedError
from benchmarks.soak.target import Action, Target
from tests.embedding_model import WORDS, text_of

PATH = "/v1/embeddings"
DIMENSIONS = 32  # of the model
FLOAT_BYTES = 4
LONGEST = 100  # words: the model's context has 128


def words(dice: random.Random) -> list[int]:
    return [dice.randrange(WORDS) for _ in range(dice.randint(1, LONGEST))]


def inputs(dice: random.Random) -> list[str]:
    return [text_of(words(dice)) for _ in range(dice.randint(1, 12))]


async def embed_grpc(target: Target, dice: random.Random) -> None:
    given: list[Any] = dice.choice((inputs(dice), [words(dice), words(dice)]))
    embedded = await target.grpc.embed(given, cache_salt=dice.choice(["", "salt"]))
    if [len(vector) for vector in embedded.embeddings] != [DIMENSIONS] * len(given):
        raise UnexpectedError("embeddings of another shape")


async def embed_grpc_invalid(target: Target, dice: random.Random) -> None:
    for given in (["w1 " * 500], [[10**6]], [[]]):
        await target.outcomes.refusal(target.grpc.embed(given), "INVALID_ARGUMENT")
    await target.outcomes.refusal(target.grpc.generate("w1", max_tokens=1), "UNIMPLEMENTED")


async def embed_late(target: Target, dice: random.Random) -> None:
    call = target.grpc.embed(inputs(dice) * 4, timeout=dice.uniform(0.001, 0.05))
    await target.outcomes.refusal(call, "OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")


async def embed_single(target: Target, dice: random.Random) -> None:
    given: str | list[int] = dice.choice((text_of(words(dice)), words(dice)))
    await check_answer(target, {"input": given}, 1)


async def embed_list(target: Target, dice: random.Random) -> None:
    given = inputs(dice)
    await check_answer(target, {"input": given, "dimensions": DIMENSIONS}, len(given))


async def embed_base64(target: Target, dice: random.Random) -> None:
    given = inputs(dice)
    await check_answer(target, {"input": given, "encoding_format": "base64"}, len(given))


async def check_answer(target: Target, body: dict[str, Any], count: int) -> None:
    """Ask, and check the number of vectors and of their numbers."""
    for entry in (answer := await post(target, PATH, body))["data"]:
        vector = entry["embedding"]
        size = len(b64decode(vector)) / FLOAT_BYTES if isinstance(vector, str) else len(vector)
        if size != DIMENSIONS:
            raise UnexpectedError("embedding of another length", str(size))
    if len(answer["data"]) != count:
        raise UnexpectedError("other number of embeddings", f"{len(answer['data'])} of {count}")


async def embed_left(target: Target, dice: random.Random) -> None:
    """Go away before the answer."""
    try:
        async with asyncio.timeout(dice.uniform(0.001, 0.03)):
            await post(target, PATH, {"input": inputs(dice) * 4})
    except TimeoutError:
        target.outcomes.refused += 1


async def embed_pages(target: Target, dice: random.Random) -> None:
    for path in ("/metrics", "/health", "/v1/models"):
        response = await target.http.get(path)
        check(response, response.text, 200)


ACTIONS: tuple[Action, ...] = (
    embed_grpc,
    embed_grpc_invalid,
    embed_late,
    embed_single,
    embed_list,
    embed_base64,
    embed_left,
    embed_pages,
)
