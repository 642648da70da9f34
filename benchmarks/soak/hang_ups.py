"""Actions of clients of HTTP that go away: in mid-stream by FIN or RST, or before an answer."""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx

from benchmarks.soak.http_calls import CHAT, COMPLETIONS, Body, events, post
from benchmarks.soak.target import Action, Target, connections
from benchmarks.soak.texts import TEXTS, messages, schema

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, and for no time


async def fin(target: Target, dice: random.Random) -> None:
    await leave_stream(target, dice, reset=False)


async def rst(target: Target, dice: random.Random) -> None:
    await leave_stream(target, dice, reset=True)


async def leave_stream(target: Target, dice: random.Random, reset: bool) -> None:
    """Read a part of a stream and end its connection, which nothing else uses."""
    body = {"prompt": dice.choice(TEXTS), "max_tokens": 300, "ignore_eos": True, "stream": True}
    body |= {"n": dice.choice([1, 1, 3])}
    leave = dice.randint(1, 20)
    async with (
        connections(str(target.http.base_url)) as http,
        http.stream("POST", COMPLETIONS, json=body) as response,
    ):
        chunks = events(response)
        async for _ in chunks:
            leave -= 1
            if not leave:
                break
        await end_connection(response, chunks, reset)


async def end_connection(
    response: httpx.Response, chunks: AsyncIterator[Body], reset: bool
) -> None:
    """Send RST, or FIN alone and take what the server still sends.

    A socket that is closed with unread data sends RST whatever its options are.
    """
    raw = response.extensions["network_stream"].get_extra_info("socket")
    if reset:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return  # whoever leaves the response closes the socket
    raw.shutdown(socket.SHUT_WR)
    with suppress(httpx.TransportError):  # the server breaks its answer off
        async for _ in chunks:
            pass


async def before_an_answer(target: Target, dice: random.Random) -> None:
    """Go away before a whole answer, while it waits, its grammar compiles, or it runs."""
    form = {"name": "thing", "schema": schema(dice)}
    wanted = {"type": "json_schema", "json_schema": form}
    body: Body = {"messages": messages(dice), "max_tokens": 200}
    body |= dice.choice(({}, {"response_format": wanted}))
    try:
        async with asyncio.timeout(dice.uniform(0.001, 0.2)):
            await post(target, CHAT, body)
    except TimeoutError:
        target.outcomes.refused += 1


ACTIONS: tuple[Action, ...] = (fin, rst, before_an_answer)
