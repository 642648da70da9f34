"""A light client of a server whose rows and queue a heavy one fills, on a simulated clock.

Origin: four requests of 16 choices from one client held another client's for 80 seconds.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.errors import QueueFullError, RequestError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.client_rules import ClientRules, Priorities
from jaxserve.server.core.embedding import embed
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.waiting_queue import Newcomer, WaitingQueue
from tests.jaxserve.server.simulation import Mix, Outcomes, Simulation

LIGHT = Mix(output_tokens=(16,), client="light")


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[Simulation]:
    simulation = Simulation(tmp_path, limits=Limits(max_waiting_requests=64))
    yield simulation
    simulation.close()


def beside(
    simulation: Simulation, heavy: Mix, rate: float, seconds: float
) -> tuple[Outcomes, Outcomes]:
    """Let a light client send one request after the other while a heavy one sends at a rate."""
    light_outcomes = Outcomes(seconds)
    heavy_outcomes = Outcomes(seconds)
    end = simulation.loop.time() + seconds

    async def light() -> None:
        await asyncio.sleep(1.0)
        while simulation.loop.time() < end:
            await asyncio.sleep(await simulation.ask(LIGHT, light_outcomes, end + 2))

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(light())
            while simulation.loop.time() < end:
                group.create_task(simulation.ask(heavy, heavy_outcomes, end))
                await asyncio.sleep(simulation.draw.expovariate(rate))

    simulation.run(both())
    return light_outcomes, heavy_outcomes


@pytest.mark.parametrize(
    "heavy",
    [
        pytest.param(Mix(client="heavy"), marks=pytest.mark.slow),
        Mix(output_tokens=(32,), choices=16, client="heavy"),
        pytest.param(
            Mix(output_tokens=(128,), deadlines=(3600.0,), client="heavy"), marks=pytest.mark.slow
        ),
        Mix(prompt_tokens=(400,), deadlines=(3600.0,), client="heavy"),
    ],
    ids=["deadlines", "choices", "no deadlines", "long prompts"],
)
def test_a_light_client_is_served_while_a_heavy_one_overloads_the_server(
    simulation: Simulation, heavy: Mix
) -> None:
    alone = simulation.closed(LIGHT, 1, 3.0)
    light, others = beside(simulation, heavy, rate=100.0, seconds=6.0)
    assert (light.refused, light.late) == (0, 0)
    assert light.good / (light.seconds - 1) > alone.goodput / 8
    assert others.refused, "the heavy client asks for more than there is"


def params(max_tokens: int = 300) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_a_full_queue_gives_places_of_whoever_has_most(simulation: Simulation) -> None:
    ends: list[str] = []

    async def ask(client: str, number: int) -> None:
        incoming = IncomingRequest(prompt=[1, 2], params=params(), client=client)
        try:
            with await simulation.service.answer(incoming) as answer:
                await answer.whole()
        except QueueFullError as error:
            assert "given to a client that has less in it" in str(error) or number == 80
            assert (error.retry_after or 0) > 0
            ends.append(f"{client} {number}")

    async def fill() -> None:
        async with asyncio.TaskGroup() as group:
            heavy = [group.create_task(ask("heavy", number)) for number in range(16)]
            await asyncio.sleep(0.1)
            heavy += [group.create_task(ask("heavy", number)) for number in range(16, 80)]
            await asyncio.sleep(0.1)
            assert len(simulation.service._load.queue) == 64
            heavy.append(group.create_task(ask("heavy", 80)))
            light = [group.create_task(ask("light", number)) for number in range(3)]
            await asyncio.sleep(0.5)
            for task in heavy + light:
                task.cancel()

    simulation.run(fill())
    assert ends == ["heavy 80", "heavy 79", "heavy 78", "heavy 77"]


def test_a_queue_that_is_full_of_tokens_has_room_for_a_light_client(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, limits=Limits(max_waiting_tokens=10_000))
    heavy = Mix(prompt_tokens=(400,), deadlines=(3600.0,), client="heavy")
    light, others = beside(simulation, heavy, rate=100.0, seconds=4.0)
    assert others.refused and light.good > 2
    assert (light.refused, light.late) == (0, 0)
    simulation.close()


@pytest.mark.parametrize("priority", [0, 60])
def test_a_request_of_a_higher_priority_gives_no_place(tmp_path: Path, priority: int) -> None:
    """The newest of the lowest priority does; a newcomer of a lower priority is refused."""
    simulation = Simulation(tmp_path, rows=1, limits=Limits(max_waiting_requests=8))
    ends: list[tuple[str, str]] = []

    async def ask(name: str, client: str, priority: int) -> None:
        incoming = IncomingRequest(prompt=[1, 2], params=params(), client=client, priority=priority)
        try:
            with await simulation.service.answer(incoming) as answer:
                await answer.whole()
        except QueueFullError:
            ends.append((name, client))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask("first", "heavy", 0))]
            await asyncio.sleep(0.1)
            for number in range(7):
                tasks.append(group.create_task(ask(f"patient {number}", "heavy", 50)))
            tasks.append(group.create_task(ask("urgent", "heavy", 10)))
            await asyncio.sleep(0.1)
            tasks.append(group.create_task(ask("new", "light", priority)))
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()

    simulation.run(main())
    assert ends == ([("patient 6", "heavy")] if priority == 0 else [("new", "light")])
    simulation.close()


def test_a_refused_request_takes_no_place(simulation: Simulation) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(80):
                incoming = IncomingRequest(prompt=[1, 2], params=params(), client="heavy")
                answer = await simulation.service.answer(incoming)
                tasks.append(group.create_task(answer.whole()))
                if number == 15:
                    await asyncio.sleep(0.1)  # they have got their rows
            waiting = len(simulation.service._load.queue)
            assert waiting == 64
            for _ in range(4):
                too_long = IncomingRequest(prompt=[1] * 600, client="light")
                with pytest.raises(RequestError, match="exceed the context"):
                    await simulation.service.answer(too_long)
            assert len(simulation.service._load.queue) == waiting
            for task in tasks:
                task.cancel()

    simulation.run(main())


def test_each_newcomer_takes_one_place_at_most(simulation: Simulation) -> None:
    """Fifteen that are tokenized beside it turn out to be too long, and one is aborted."""
    ended: list[object] = []

    async def hold(answer: Answer) -> None:
        try:
            await answer.whole()
        except QueueFullError as error:
            ended.append(error)

    async def refused() -> None:
        with pytest.raises(RequestError, match="exceed the context"):
            await simulation.service.answer(IncomingRequest(prompt=[1] * 600, client="light"))

    async def aborted() -> None:
        incoming = IncomingRequest(prompt="x" * 400, client="light", request_id="aborted")
        with await simulation.service.answer(incoming) as answer:
            assert (await answer.whole()).completions[0].finish_reason == "abort"

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(80):
                incoming = IncomingRequest(prompt=[1, 2], params=params(), client="heavy")
                tasks.append(group.create_task(hold(await simulation.service.answer(incoming))))
                if number == 15:
                    await asyncio.sleep(0.1)  # they have got their rows
            others = [group.create_task(refused()) for _ in range(14)]
            incoming = IncomingRequest(prompt=[3], params=params(1), client="light")
            with await simulation.service.answer(incoming) as answer:
                await answer.whole()
            await asyncio.gather(*others)
            assert len(ended) == 1
            abort = group.create_task(aborted())
            await asyncio.sleep(0)
            simulation.service.abort("aborted")
            await abort
            for task in tasks:
                task.cancel()

    simulation.run(main())
    assert len(ended) == 1


def test_a_call_that_has_begun_keeps_the_places_of_its_other_prompts() -> None:
    queue = WaitingQueue(100)
    for number in range(4):
        for call in ("begun", "waiting"):
            id = f"{call}-{number}"
            queue.enter(id, "heavy", call)
            queue.queue_prompt(id, Request(id=id, prompt=(1, 2), client="heavy"))
    queue.begin("begun-0")
    queue.leave("begun-0")  # its first token has come
    newcomer = Newcomer("light", 0, requests=1)
    assert queue.displaced_by(newcomer, 3, 0) == ["waiting-3", "waiting-2", "waiting-1"]
    for number in range(4):
        queue.leave(f"waiting-{number}")
    assert queue.displaced_by(newcomer, 1, 0) is None
    for number in range(1, 4):
        queue.leave(f"begun-{number}")
    assert not (queue._begun or queue._calls or queue._waiting_of_call.by_key)


def test_nobody_is_left_with_less_than_the_newcomer() -> None:
    """In requests A has most, in tokens it has less than the newcomer afterwards."""
    queue = WaitingQueue(100)
    for client, count, tokens in (("a", 3, 100), ("c", 2, 125)):
        for number in range(count):
            id = f"{client}{number}"
            queue.enter(id, client)
            queue.queue_prompt(id, Request(id=id, prompt=(1,) * tokens, client=client))
    queue.enter("new", "b")
    newcomer = Newcomer("b", 0, tokens=150)
    assert queue.displaced_by(newcomer, 1, 150) is None
    assert queue.displaced_by(newcomer, 1, 100) == ["a2"]


def test_inputs_of_a_batch_that_left_the_queue_enter_it_again(tmp_path: Path) -> None:
    limits = Limits(max_waiting_requests=32)
    simulation = Simulation(tmp_path, rows=4, limits=limits, embeds=True)
    batch = [
        IncomingRequest(prompt=[n % 50 + 1] * 30, embed=True, request_id=f"b{n}", client="batch")
        for n in range(400)
    ]
    light = 0

    async def main() -> None:
        nonlocal light
        embedding = asyncio.create_task(embed(simulation.service, batch))
        await asyncio.sleep(0.5)
        assert len(simulation.service._load.queue) == 32
        while not embedding.done():
            incoming = IncomingRequest(prompt=[3] * 10, embed=True, client="light")
            with await simulation.service.answer(incoming) as answer:
                await answer.whole()
            light += 1
            await asyncio.sleep(0.05)
        assert len(await embedding) == 400

    simulation.run(main())
    assert light > 3
    simulation.close()


@pytest.mark.parametrize(
    ("rules", "first", "last"),
    [(ClientRules(), 0, 100), (ClientRules(client_priorities=Priorities(-5, 5)), -5, 5)],
)
def test_clients_may_ask_for_the_priorities_that_the_server_allows(
    tmp_path: Path, rules: ClientRules, first: int, last: int
) -> None:
    simulation = Simulation(tmp_path, rules=rules)

    async def ask(priority: int) -> None:
        incoming = IncomingRequest(prompt=[1], params=params(max_tokens=1), priority=priority)
        with await simulation.service.answer(incoming) as answer:
            await answer.whole()

    async def main() -> None:
        await ask(first)
        await ask(last)
        for refused in (first - 1, last + 1):
            allowed = f"clients may ask for {first} to {last} \\(--client-priorities\\)"
            with pytest.raises(RequestError, match=f"priority is {refused}; {allowed}"):
                await ask(refused)

    simulation.run(main())
    simulation.close()
