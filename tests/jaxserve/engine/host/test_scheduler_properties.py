"""Any traffic on any small engine: every choice ends once, with the naive tokens."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, EngineOptions, StateSize, resolve
from jaxserve.errors import RequestError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fake_groups import FakeGroup
from tests.fake_model import VOCAB
from tests.jaxserve.engine.host.checks import Result
from tests.jaxserve.engine.host.driver import Driver, ScriptedProposer, ScriptedSpeculation

Groups = tuple[FakeGroup, ...]
ODD_ENDS = tuple(range(3, VOCAB, 9))  # one token in nine ends a choice
FEW_TOKENS = (1, 10, 11, 12, 13, 50, 60, 66)
WINDOWS = ((None,), (None,), (None, None), (6,), (None, 5), (3, None), (9, 1))  # of the page groups
# As many numbers as that many tokens: snapshots are many, few, or none.
STATE_SIZES = st.sampled_from([StateSize(4, 1), StateSize(20, 1), StateSize(400, 1)])
BASES = (
    (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20),
    (5, 6, 7, 8, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4),
)


@dataclass(frozen=True)
class EngineSetup:
    """Parameters of an engine to be built."""

    config: EngineConfig
    drafts: int  # most drafted tokens; 0: no proposer
    by_device: bool  # the device drafts, otherwise the host does
    spoilt_step: int  # every so many steps some rows are not finite; 0: never
    groups: Groups | None = None

    def driver(self) -> Driver:
        def spoils(number: int, lane: int, row: int) -> bool:
            return self.spoilt_step > 0 and (number * 7 + lane * 3 + row) % self.spoilt_step == 0

        window = self.config.pools[0].window
        if self.drafts and self.by_device:
            speculation = ScriptedSpeculation(self.drafts)
            return Driver(self.config, speculation=speculation, spoils=spoils, groups=self.groups)
        proposer = ScriptedProposer(self.drafts, window=window) if self.drafts else None
        return Driver(self.config, proposer=proposer, spoils=spoils, groups=self.groups)


@st.composite
def configs(
    draw: st.DrawFn, deterministic: bool, embeds: bool = False, groups: Groups | None = None
) -> EngineConfig:
    page_size = draw(st.integers(1, 8))
    max_batch = draw(st.integers(1, 4))
    step_tokens = draw(st.integers(max(page_size, max_batch) if deterministic else max_batch, 16))
    options = EngineOptions(
        max_batch=max_batch,
        step_tokens=step_tokens,
        decode_steps=None
        if deterministic or embeds
        else min(draw(st.sampled_from([1, 1, 2, 3, 5])), step_tokens),
        page_size=page_size,
        cache_tokens=draw(st.integers(page_size, 40)),
        max_context=draw(st.integers(2, 40)),
        prefix_cache=draw(st.booleans()),
        deterministic=deterministic,
        snapshot_answers=draw(st.booleans()),
    )
    lanes = draw(st.integers(1, 3))
    if groups is None:
        groups = tuple(map(FakeGroup, draw(st.sampled_from(WINDOWS))))
    return resolve(
        options,
        max_positions=40,
        lanes=lanes,
        affordable_tokens=1000,
        windows=[group.window for group in groups if not group.slot],
        states=[draw(STATE_SIZES) for group in groups if group.slot],
        embeds=embeds,
    )


@st.composite
def engine_setups(
    draw: st.DrawFn, embeds: bool = False, groups: Groups | None = None
) -> EngineSetup:
    config = draw(configs(deterministic=False, embeds=embeds, groups=groups))
    full = any(pool.window is None for pool in config.pools)
    return EngineSetup(
        config,
        drafts=0 if embeds else draw(st.sampled_from([0, 0, 1, 4])),
        by_device=full and draw(st.booleans()),
        spoilt_step=draw(st.sampled_from([0, 0, 23])),
        groups=groups,
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw everything of a request but its id."""
    prompt = draw(st.sampled_from(BASES))[: draw(st.integers(1, 16))] + tuple(
        draw(st.lists(st.integers(0, 3), max_size=3))
    )
    max_tokens = draw(st.none() | st.integers(1, 12))
    params = {
        "seed": draw(st.integers(0, 9)),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, min(max_tokens or 4, 4))),
        "stop_token_ids": draw(st.sampled_from([(), (1, 50)])),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.5])),
        "logit_bias": draw(st.sampled_from([{}, {4: 2.0, 9: -3.0}])),
        "allowed_token_ids": draw(st.sampled_from([None, FEW_TOKENS])),
    }
    salt = draw(st.sampled_from(["", "", "w", "x"]))
    priority = draw(st.integers(0, 1))
    client = draw(st.sampled_from("abc"))
    return {
        "prompt": prompt,
        "params": params,
        "salt": salt,
        "priority": priority,
        "client": client,
    }


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), requests()),
    st.tuples(st.just("submit"), requests()),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("stop"), st.integers(0, 9)),
    st.tuples(st.just("flush"), st.none()),
)


def play(driver: Driver, actions: list[tuple[str, Any]]) -> None:
    """Take the actions in order, then run steps until all is done."""
    for number, (action, argument) in enumerate(actions):
        choices = list(driver.results)
        if action == "submit":
            params = SamplingParams(**argument["params"])
            submit(
                driver,
                Request(**{**argument, "id": f"r{number}", "params": params, "eos_ids": ODD_ENDS}),
            )
        elif action == "steps":
            for _ in range(argument):
                driver.step()
        elif action == "flush":
            driver.scheduler.flush_cache()
        elif choices:
            choice = choices[argument % len(choices)]
            driver.abort(choice[0]) if action == "abort" else driver.stop(*choice)
        driver.scheduler.check_invariants()
    driver.run()


def submit(driver: Driver, request: Request) -> None:
    """Queue a request; check that it is refused exactly when it can never run."""
    limit = min(driver.config.max_context, driver.config.capacity)
    generated = 0 if driver.config.embeds else request.params.max_tokens or 1
    fits = len(request.prompt) + generated <= limit
    try:
        driver.submit(request)
    except RequestError:
        assert not fits
    else:
        assert fits


@settings(max_examples=150, derandomize=True)
@given(engine_setups(), st.lists(ACTIONS, min_size=3, max_size=16))
def test_any_traffic(setup: EngineSetup, actions: list[tuple[str, Any]]) -> None:
    play(setup.driver(), actions)


@settings(max_examples=80, derandomize=True)
@given(engine_setups(), st.integers(1, 7), st.lists(ACTIONS, min_size=6, max_size=16))
def test_any_traffic_whose_drafts_the_device_makes(
    setup: EngineSetup, drafts: int, actions: list[tuple[str, Any]]
) -> None:
    """The device drafts for every request."""
    assume(any(pool.window is None for pool in setup.config.pools))
    drafting = [
        (what, argument | {"salt": "w"} if what == "submit" else argument)
        for what, argument in actions
    ]
    play(replace(setup, drafts=drafts, by_device=True).driver(), drafting)


@settings(max_examples=100, derandomize=True)
@given(configs(deterministic=True), st.lists(ACTIONS, min_size=3, max_size=16))
def test_any_traffic_deterministic(config: EngineConfig, actions: list[tuple[str, Any]]) -> None:
    """No step is mixed, chunks keep to borders, no sequence is preempted, pages are reserved."""
    play(Driver(config), actions)


@settings(max_examples=150, derandomize=True)
@given(engine_setups(embeds=True), st.lists(ACTIONS, min_size=3, max_size=16))
def test_any_traffic_of_embeddings(setup: EngineSetup, actions: list[tuple[str, Any]]) -> None:
    """Sampling parameters make no difference to an embedding."""
    play(setup.driver(), actions)


@settings(max_examples=100, derandomize=True)
@given(configs(deterministic=True, embeds=True), st.lists(ACTIONS, min_size=3, max_size=16))
def test_any_traffic_of_embeddings_deterministic(
    config: EngineConfig, actions: list[tuple[str, Any]]
) -> None:
    play(Driver(config), actions)


@settings(max_examples=90, derandomize=True)
@given(
    st.booleans().flatmap(lambda embeds: configs(deterministic=True, embeds=embeds)),
    st.lists(ACTIONS, min_size=3, max_size=16),
)
def test_deterministic_bits_do_not_depend_on_load(
    config: EngineConfig, actions: list[tuple[str, Any]]
) -> None:
    """Tokens are those of a run alone, though the device's last bits depend on chunk borders."""
    loaded = Driver(config, executables_differ=True)
    play(loaded, actions)
    for request in {
        result.request.id: result.request for result in loaded.results.values()
    }.values():
        alone = Driver(replace(config, prefix_cache=False), executables_differ=True)
        alone.submit(request)
        alone.run()
        for choice, expected in alone.results.items():
            check_same_bits(loaded.results[choice], expected)


def check_same_bits(got: Result, alone: Result) -> None:
    """Check tokens, end and chunks against a run alone.

    Chunks are compared behind the cached prefix, and as far as the choice was left to run.
    """
    ended_early = got.asked_to_end is not None
    assert got.tokens == (alone.tokens[: len(got.tokens)] if ended_early else alone.tokens)
    assert got.embedding == (None if ended_early else alone.embedding)
    assert ended_early or got.finish == alone.finish
    first = got.cuts[0][1] if got.cuts else 0
    cuts = [cut for cut in alone.cuts if cut[1] >= first]
    common = min(len(cuts), len(got.cuts))
    assert got.cuts[:common] == cuts[:common]
    assert ended_early or abs(len(cuts) - len(got.cuts)) <= 1, (
        "more than the step launched before the end was known"
    )
