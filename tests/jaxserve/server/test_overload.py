"""Goodput at and beyond the capacity, on a simulated clock.

Origin: a server that admitted everything delivered a fifth of its capacity at twice the load, since
every request was computed until its deadline passed.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.errors import DeadlineError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.incoming_request import IncomingRequest
from tests.jaxserve.server.simulation import Mix, Simulation, Steps
from tests.slow_cases import slow_but

SECONDS = 6.0
MIXES = {
    "equal": Mix(),
    "mixed lengths": Mix(prompt_tokens=(8, 30, 100), output_tokens=(16, 64, 128)),
    "mixed deadlines": Mix(deadlines=(1.0, 2.0, 6.0)),
    "four choices": Mix(output_tokens=(32,), choices=4),
    "whole context": Mix(prompt_tokens=(480,), output_tokens=(16,)),
    "each a client of its own": Mix(output_tokens=(32,), choices=4, clients=10**9),
    "eight clients": Mix(clients=8),
}
QUICK_MIXES = ("mixed lengths", "mixed deadlines", "each a client of its own")


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[Simulation]:
    simulation = Simulation(tmp_path)
    yield simulation
    simulation.close()


@pytest.mark.parametrize("name", slow_but(list(MIXES), QUICK_MIXES))
def test_goodput_stays_at_the_capacity(simulation: Simulation, name: str) -> None:
    mix = MIXES[name]
    clients = simulation.rows // mix.choices
    simulation.closed(mix, clients, 4.0)  # what the server learns from
    capacity = simulation.closed(mix, clients, SECONDS).goodput
    assert capacity > 0
    for load in (2, 4):
        found = simulation.open(mix, load * capacity, SECONDS)
        assert found.goodput >= 0.9 * capacity, (load, capacity, found)
        assert max(found.refusal_seconds) <= 0.05, "a refusal comes at once"
    alone = simulation.closed(mix, 1, SECONDS)
    assert alone.good >= alone.sent - 1, "only the last one may end after the time"
    assert (alone.refused, alone.late) == (0, 0), "nothing of the overload is left"


def test_steps_of_uneven_length_cut_few_answers(tmp_path: Path) -> None:
    """With rows that went to answers as slow as expected, a third were cut at their deadline."""
    steps = Steps(empty=0.06, token=0.002, spread=0.3, stalls=0.02)
    simulation = Simulation(tmp_path, steps=steps)
    mix = Mix(output_tokens=(32,), deadlines=(6.0,))
    simulation.closed(mix, simulation.rows, 12.0)
    capacity = simulation.closed(mix, simulation.rows, 30.0).goodput
    found = simulation.open(mix, 4 * capacity, 30.0)
    simulation.close()
    assert found.late <= 0.1 * (found.sent - found.refused)
    assert found.goodput >= 0.8 * capacity, "the first answers come after 4 of the 30 seconds"


def test_below_the_capacity_nobody_is_refused(simulation: Simulation) -> None:
    mix = Mix()
    capacity = simulation.closed(mix, simulation.rows, SECONDS).goodput
    found = simulation.open(mix, 0.6 * capacity, SECONDS)
    assert (found.refused, found.late) == (0, 0)


def test_a_free_row_goes_to_an_answer_that_is_in_time_at_the_usual_pace(
    simulation: Simulation,
) -> None:
    """Requests that come together wait for each other's prompts, and half of the rows are free."""
    mix = Mix(deadlines=(1.0,))
    simulation.closed(mix, simulation.rows, SECONDS)
    for _ in range(64):
        simulation.service._load.pace.slowness.add(3.0)
    found = simulation.closed(mix, simulation.rows // 2, 0.9)
    assert found.good >= simulation.rows // 2 and (found.refused, found.late) == (0, 0)


def test_after_an_overload_the_pace_of_then_refuses_nobody(simulation: Simulation) -> None:
    """A server that has nothing to do serves what it refused when it was full."""
    mix = Mix(deadlines=(2.0,))
    simulation.closed(mix, simulation.rows, SECONDS)
    simulation.open(mix, 200.0, SECONDS)
    load = simulation.service._load
    for _ in range(100):
        load.pace.observe_tokens(1.0, 1)
        load.lengths.add(400, cut=True)
    load.pace.observe_prompt(1000, 0, 1000.0)
    alone = simulation.closed(mix, 1, 1.0)
    assert alone.good and not (alone.refused or alone.late)


def test_a_client_without_a_deadline_is_bounded_by_the_queue_alone(simulation: Simulation) -> None:
    simulation.closed(Mix(), simulation.rows, SECONDS)
    found = simulation.open(Mix(deadlines=(3600.0,)), 100.0, 1.0)
    assert (found.refused, found.late) == (0, 0)


def test_a_client_that_always_asks_for_the_most_is_not_refused_for_it(
    simulation: Simulation,
) -> None:
    """Answers of the usual length fit the deadline; 400 tokens would not."""
    load = simulation.service._load
    for _ in range(20):
        load.lengths.add(20, cut=False)
    load.pace.observe_tokens(0.01, 1)
    most = Mix(output_tokens=(400,), deadlines=(2.0,))
    found = simulation.open(most, 20.0, 0.5)
    assert found.refused == 0


def test_one_request_a_second_may_show_that_it_is_in_time(simulation: Simulation) -> None:
    """Prompts are taken to be too slow for any deadline, and others run all the time."""
    service = simulation.service
    for _ in range(100):
        service._load.pace.observe_tokens(0.01, 1)
    service._load.pace.observe_prompt(1000, 0, 1000.0)
    found: list[str] = []

    async def ask() -> str:
        incoming = IncomingRequest(prompt=[1] * 100, timeout=1.0, arrived=simulation.loop.time())
        try:
            (await service.answer(incoming)).close()
        except DeadlineError:
            return "refused"
        return "admitted"

    async def beside_a_long_one() -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        with await service.answer(IncomingRequest(prompt=[1, 2], params=params)):
            for _ in range(8):
                found.append(await ask())
                await asyncio.sleep(0.25)

    simulation.run(beside_a_long_one())
    assert found.count("admitted") == 2, found
