"""Prompts that are embedded, in single situations: a sequence ends with its prompt."""

import pytest

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.events import Finish, FinishReason
from jaxserve.errors import CapacityError, ConfigError, ContextLengthError, NonFiniteLogitsError
from tests.fake_model import naive_embedding
from tests.jaxserve.engine.host.driver import PROMPT, Driver, config_of, request


def cuts(driver: Driver, name: str = "a") -> list[tuple[str, int, int]]:
    return driver.results[name, 0].cuts


def test_a_prompt_that_is_embedded_whole() -> None:
    driver = Driver(config_of(embeds=True))
    driver.submit(request())
    driver.run()
    result = driver.results["a", 0]
    assert result.embedding == naive_embedding(PROMPT) and result.finish == Finish(
        FinishReason.STOP
    )
    assert cuts(driver) == [("embed", 0, 10)] and result.times and not result.times.first_token
    assert [plan.lanes[0].samples for plan in driver.plans] == [[0]]


def test_in_chunks_beside_others() -> None:
    driver = Driver(config_of(embeds=True, step_tokens=8))
    driver.submit(request("short", prompt=(1, 2)))
    driver.submit(request("long", prompt=tuple(range(20))))
    driver.submit(request("last", prompt=(4,)))
    driver.run()
    assert cuts(driver, "long") == [("embed", 0, 6), ("embed", 6, 8), ("embed", 14, 6)]
    assert [len(plan.lanes[0].rows) for plan in driver.plans] == [2, 1, 2]


def test_of_a_prompt_that_was_there_before_the_last_page_is_computed() -> None:
    driver = Driver(config_of(embeds=True))
    for name, prompt in (("first", PROMPT[:8]), ("same", PROMPT[:8]), ("longer", PROMPT)):
        driver.submit(request(name, prompt=prompt))
        driver.run()
    assert [cuts(driver, name) for name in ("same", "longer")] == [
        [("embed", 4, 4)],
        [("embed", 8, 2)],
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_may_fill_the_context_and_the_cache(deterministic: bool) -> None:
    """The prompt reaches to the last position of the last page."""
    config = config_of(
        embeds=True, deterministic=deterministic, max_context=16, num_pages=4, prefix_cache=False
    )
    driver = Driver(config)
    driver.submit(request(prompt=tuple(range(16))))
    driver.run()
    with pytest.raises(
        ContextLengthError,
        match=r"prompt: 17 tokens exceed the context of 16 \(shorten the prompt, or",
    ):
        driver.submit(request(prompt=tuple(range(17))))
    small = Driver(config_of(embeds=True, num_pages=2))
    with pytest.raises(
        CapacityError, match="prompt: 9 tokens can never fit the page pool of 8 tokens"
    ):
        small.submit(request(prompt=tuple(range(9))))


def test_an_abort_between_chunks_gives_everything_back() -> None:
    driver = Driver(config_of(embeds=True, step_tokens=4))
    driver.submit(request(prompt=tuple(range(20))))
    driver.step()
    driver.step()
    driver.abort("a")
    driver.run()
    assert len(cuts(driver)) == 2 and driver.results["a", 0].finish == Finish(FinishReason.ABORT)


@pytest.mark.parametrize("spoilt", [1, 2, 3])
def test_values_that_are_not_finite_end_that_request_alone(spoilt: int) -> None:
    """Values may be spoilt in any chunk; no page of the prompt can be found afterwards."""
    driver = Driver(
        config_of(embeds=True, step_tokens=8, page_size=2),
        spoils=lambda number, lane, row: (number, row) == (spoilt, 1),
    )
    driver.submit(request("good", prompt=tuple(range(3))))
    driver.submit(request("bad", prompt=tuple(range(50, 70))))
    driver.run()
    finish = driver.results["bad", 0].finish
    assert finish is not None and isinstance(finish.error, NonFiniteLogitsError)
    assert (
        str(finish.error)
        == "request 'bad', choice 0: the values after 20 tokens are NaN or infinite"
    )
    assert driver.results["good", 0].embedding == naive_embedding(tuple(range(3)))
    driver.submit(request("again", prompt=tuple(range(50, 70))))
    driver.run()
    assert driver.results["again", 0].embedding == naive_embedding(tuple(range(50, 70)))


def test_decodes_are_not_to_be_launched_together() -> None:
    def steps(prefer: str, decode_steps: int | None = None) -> int:
        options = EngineOptions(prefer=prefer, decode_steps=decode_steps)  # type: ignore[arg-type]
        return resolve(
            options, max_positions=64, lanes=1, affordable_tokens=10**5, embeds=True
        ).decode_steps

    assert steps("throughput") == steps("latency", 1) == 1
    with pytest.raises(
        ConfigError,
        match=r"--decode-steps is 4; a model that embeds decodes nothing \(leave it out\)",
    ):
        steps("balanced", 4)
