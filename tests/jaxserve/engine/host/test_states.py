"""States of sequences in slots, and their snapshots, over the fake device.

The device keeps in a slot what every token of a sequence added to it, and compares that with the
pages of the same sequence: a state of another prefix breaks an assertion.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxserve.config import (
    EngineConfig,
    EngineOptions,
    SlotPool,
    StateSize,
    check_snapshots,
    resolve,
)
from jaxserve.errors import ConfigError
from jaxserve.structure import Structure
from tests.fake_grammar import END, TableGrammar
from tests.fake_groups import FakeGroup
from tests.jaxserve.engine.host.driver import (
    PROMPT,
    Driver,
    ScriptedProposer,
    ScriptedSpeculation,
    request,
)
from tests.jaxserve.engine.host.faults import read_newest_states
from tests.jaxserve.engine.host.test_scheduler_properties import (
    ACTIONS,
    BASES,
    EngineSetup,
    check_same_bits,
    play,
    submit,
)

FULL = FakeGroup(layers=2, value=3)
SLOT = FakeGroup(slot=True)
LONG = tuple(range(5, 25))  # prompt of 20 tokens
SOME = Structure.of("json_object", True)
ANY_TOKEN = TableGrammar(({token: 0 for token in range(90)},))
# Some tokens lead into a run of five that are forced.
FORCING = TableGrammar(
    (
        {token: int(token > END - 9) for token in range(END)},
        *({7 * n: (n + 1) % 6} for n in range(1, 6)),
    )
)


def states_config(size: int = 8, **changes: Any) -> EngineConfig:
    """Return a small engine whose model has pages in one group and slots in the other.

    Args:
        size: Tokens whose pages take as much memory as a slot.
        **changes: Fields of EngineOptions.
    """
    chosen: dict[str, Any] = {
        "max_batch": 2,
        "step_tokens": 8,
        "page_size": 2,
        "cache_tokens": 64,
        "snapshot_interval": 8,
    }
    options = EngineOptions(**chosen | changes)
    states = [StateSize(4 * size, 1)]  # numbers of pages have 4 bytes
    if "prefix_cache" in changes:
        options = replace(options, snapshot_interval=None)
    return resolve(options, max_positions=256, lanes=1, affordable_tokens=0, states=states)


def run_one(driver: Driver, name: str, prompt: tuple[int, ...], **params: Any) -> list[int]:
    """Run one request and return its tokens."""
    driver.submit(request(name, prompt=prompt, **params))
    driver.run()
    return driver.results[name, 0].tokens


def cached(driver: Driver, name: str, index: int = 0) -> int:
    """Return how many tokens of a choice were found in the prefix cache."""
    times = driver.results[name, index].times
    assert times
    return times.cached


# ---- Any traffic


@st.composite
def state_configs(draw: st.DrawFn, deterministic: bool = False) -> EngineConfig:
    """Draw engines in which prefixes are found often, in few slots or many."""
    page_size = draw(st.integers(1, 4))
    max_batch = draw(st.integers(1, 4))
    options = EngineOptions(
        max_batch=max_batch,
        step_tokens=draw(st.integers(max(page_size, max_batch), 16)),
        decode_steps=None if deterministic else draw(st.sampled_from([1, 1, 2, 3])),
        page_size=page_size,
        cache_tokens=draw(st.sampled_from([24, 40, 200])),
        max_context=24,
        deterministic=deterministic,
        snapshot_share=draw(st.sampled_from([None, 0.0, 0.5, 0.9])),
        snapshot_answers=draw(st.booleans()),
    )
    options = replace(options, step_tokens=max(options.step_tokens or 0, options.decode_steps or 0))
    states = [StateSize(draw(st.sampled_from([1, 8, 100])), 1)]
    config = resolve(
        options, max_positions=24, lanes=draw(st.integers(1, 2)), affordable_tokens=0, states=states
    )
    if not deterministic and draw(st.booleans()):
        interval = page_size * draw(st.integers(1, 3))
        pools = (config.pools[0], replace(config.pools[1], interval=interval))
        config = replace(config, pools=pools)
    return config


@st.composite
def alike_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw requests whose prompts begin alike, and go on differently."""
    begin = draw(st.sampled_from([4, 8, 12]))
    end = tuple(draw(st.lists(st.integers(0, 1), max_size=6)))
    params = {
        "seed": 1,
        "max_tokens": draw(st.integers(1, 8)),
        "ignore_eos": draw(st.booleans()),
        "n": draw(st.sampled_from([1, 1, 1, 3])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 0])),
    }
    follows = draw(st.sampled_from([False, False, True]))  # a row that waits for the host
    if follows:
        params |= {"structure": SOME, "ignore_eos": False}
    return {
        "prompt": draw(st.sampled_from(BASES))[:begin] + end,
        "params": params,
        "salt": draw(st.sampled_from(["", "", "x", "w", "w"])),  # drafts come for "w"
        "priority": draw(st.integers(0, 1)),
        "client": draw(st.sampled_from("ab")),
        "grammar": draw(st.sampled_from([ANY_TOKEN, FORCING])) if follows else None,
    }


ALIKE = st.lists(
    st.tuples(st.just("submit"), alike_requests())
    | st.tuples(st.just("steps"), st.integers(1, 9))
    | ACTIONS,
    min_size=8,
    max_size=24,
)


@st.composite
def state_setups(draw: st.DrawFn) -> EngineSetup:
    """Draw engines of state_configs, half of which draft tokens."""
    return EngineSetup(
        draw(state_configs()),
        drafts=draw(st.sampled_from([0, 0, 1, 4])),
        by_device=draw(st.booleans()),
        spoilt_step=draw(st.sampled_from([0, 0, 0, 23])),
        groups=(FULL, SLOT),
    )


@settings(max_examples=100, derandomize=True)
@given(state_setups(), ALIKE)
def test_any_traffic(setup: EngineSetup, actions: list[tuple[str, Any]]) -> None:
    """A hit reads the state of its own prefix and no other, whatever else happens."""
    play(setup.driver(), actions)


@settings(max_examples=40, derandomize=True)
@given(state_configs(deterministic=True), ALIKE)
def test_deterministic_bits_do_not_depend_on_load(
    config: EngineConfig, actions: list[tuple[str, Any]]
) -> None:
    """Tokens are those of a run alone, though the device's last bits depend on chunk borders."""
    loaded = Driver(config, groups=(FULL, SLOT), executables_differ=True)
    play(loaded, actions)
    alone = replace(config, prefix_cache=False)
    for each in {result.request.id: result.request for result in loaded.results.values()}.values():
        driver = Driver(alone, groups=(FULL, SLOT), executables_differ=True)
        driver.submit(each)
        driver.run()
        for choice, expected in driver.results.items():
            check_same_bits(loaded.results[choice], expected)


def four_hundred(driver: Driver) -> None:
    """Run 400 requests that begin alike in many ways, up to 12 at a time."""
    for number in range(400):
        base = BASES[number % 2]
        prompt = base[: 3 + number * 7 % 13] + (number % 3,) * (number % 4)
        chosen = request(
            str(number), prompt=prompt, salt="w", max_tokens=1 + number % 9, ignore_eos=True
        )
        submit(driver, chosen)
        while len(driver.unfinished) > 11:
            driver.step()
        if number % 17 == 0:
            driver.abort(str(max(number - 3, 0)))
    driver.run(limit=20_000)


def crowded() -> EngineConfig:
    """Return an engine that preempts, and whose snapshots come and go."""
    sizes = {"max_batch": 4, "cache_tokens": 44, "max_context": 40}
    return states_config(snapshot_interval=4, snapshot_share=0.5, **sizes)


def drafting_driver(config: EngineConfig, by_device: bool) -> Driver:
    """Return an engine that drafts tokens for requests with the salt "w"."""
    if by_device:
        return Driver(config, speculation=ScriptedSpeculation(4))
    return Driver(config, proposer=ScriptedProposer())


@pytest.mark.parametrize("by_device", [False, True])
def test_four_hundred_requests_with_drafts(by_device: bool) -> None:
    driver = drafting_driver(crowded(), by_device)
    four_hundred(driver)
    times = [result.times for result in driver.results.values() if result.times]
    assert sum(each.cached > 0 for each in times) > 100
    assert sum(each.accepted for each in times) > 15


def test_four_hundred_requests() -> None:
    driver = Driver(crowded(), groups=(FULL, SLOT))
    four_hundred(driver)
    times = [result.times for result in driver.results.values() if result.times]
    assert sum(each.cached > 0 for each in times) > 100
    assert sum(each.preemptions for each in times) > 10


def test_the_state_of_another_sequence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read_newest_states(monkeypatch)
    with pytest.raises(AssertionError):
        four_hundred(Driver(crowded(), groups=(FULL, SLOT)))

    # As test_any_traffic, without the search for a smaller example.
    @settings(max_examples=100, derandomize=True, phases=[Phase.generate], database=None)
    @given(state_setups(), ALIKE)
    def any_traffic(setup: EngineSetup, actions: list[tuple[str, Any]]) -> None:
        play(setup.driver(), actions)

    with pytest.raises((AssertionError, ExceptionGroup)):
        any_traffic()


# ---- Which snapshots there are


def test_the_next_turn_goes_on_from_the_answer() -> None:
    """Its prompt begins with the prompt and the output of the turn before."""
    driver = Driver(states_config())
    answer = run_one(driver, "first", PROMPT, max_tokens=9)
    # The newest token is in no page yet: 18 tokens are.
    run_one(driver, "second", (*PROMPT, *answer, 3, 4))
    assert cached(driver, "second") == 18


@pytest.mark.parametrize("by_device", [False, True])
def test_the_next_turn_goes_on_from_an_answer_that_was_drafted(by_device: bool) -> None:
    """Steps that pass a page's end leave the state there, though rejected tokens follow."""
    driver = drafting_driver(states_config(page_size=4, snapshot_share=0.5), by_device)
    for turn in range(12):
        prompt = (turn, *PROMPT)
        answer = run_one(driver, f"{turn}", prompt, max_tokens=5 + turn, salt="w", ignore_eos=True)
        longer = (*prompt, *answer, 3, 4)
        run_one(driver, f"{turn} goes on", longer, salt="w")
        assert cached(driver, f"{turn} goes on") == (len(prompt) + len(answer) - 1) // 4 * 4


@pytest.mark.parametrize("tokens", range(8, 56, 3))
def test_forced_tokens_pass_the_page_of_rejected_drafts(tokens: int) -> None:
    """A table that drafts have lengthened keeps the state behind a page that a chunk then ends."""
    config = states_config(page_size=4, step_tokens=16, snapshot_share=0.5)
    driver = drafting_driver(config, by_device=False)
    asked = request("a", PROMPT[:6], max_tokens=tokens, structure=SOME, salt="w")
    driver.submit(replace(asked, grammar=FORCING, eos_ids=(END,)))
    driver.run()  # the driver compares what can be found with the device
    kinds = [plan.kind for plan in driver.plans]
    assert (kinds.count("prefill") > 1 and "verify" in kinds) or tokens < 20


@pytest.mark.parametrize("changes", [{"snapshot_answers": False}, {"deterministic": True}])
def test_without_states_of_answers_it_goes_on_from_the_prompt(changes: dict[str, Any]) -> None:
    driver = Driver(states_config(**changes))
    answer = run_one(driver, "first", PROMPT, max_tokens=9)
    run_one(driver, "second", (*PROMPT, *answer, 3, 4))
    unit = driver.config.chunk_border if changes.get("deterministic") else 2
    assert cached(driver, "second") == len(PROMPT) // unit * unit


def test_long_prompts_leave_snapshots_on_their_way() -> None:
    """A prompt that has 17 tokens in common with one before goes on behind 16 of them."""
    driver = Driver(states_config(snapshot_answers=False, snapshot_share=0.5))
    run_one(driver, "first", LONG)
    run_one(driver, "same", LONG)
    run_one(driver, "other", (*LONG[:17], 1, 2, 3))
    assert [cut[1:] for cut in driver.results["first", 0].cuts if cut[0] == "prefill"] == [
        (0, 8),
        (8, 8),
        (16, 4),
    ]
    assert (cached(driver, "same"), cached(driver, "other")) == (18, 16)


def test_a_prompt_of_whole_pages_leaves_its_state_to_a_longer_one() -> None:
    """The decode that follows at once takes another slot."""
    driver = Driver(states_config(snapshot_answers=False))
    run_one(driver, "first", PROMPT[:8], max_tokens=12, ignore_eos=True)
    run_one(driver, "longer", PROMPT)
    assert cached(driver, "longer") == 8


def test_choices_go_on_from_the_prompt_of_the_first() -> None:
    driver = Driver(states_config(max_batch=4))
    driver.submit(request("a", prompt=PROMPT, n=3))
    driver.run()
    assert [cached(driver, "a", index) for index in range(3)] == [0, 8, 8]


def test_a_preempted_sequence_goes_on_from_its_last_whole_page() -> None:
    """It gave its row to another client, and its pages are still there."""
    driver = Driver(states_config(max_batch=5, cache_tokens=600, snapshot_share=0.5))
    heavy = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "client": "heavy"}
    for number in range(5):
        driver.submit(request(str(number), salt=str(number), **heavy))
    for _ in range(20):
        driver.step()
    driver.submit(request("light", prompt=PROMPT[:2], client="light"))
    driver.run()
    lengths = [a.length for plan in driver.plans for a in plan.admissions]
    assert len(lengths) == 7 and lengths[6] >= len(PROMPT)


def test_a_scored_prompt_finds_and_leaves_what_its_pages_allow() -> None:
    """Scoring takes the hidden states of all tokens, so it goes on from nothing."""
    driver = Driver(states_config(snapshot_share=0.5))
    for name in ("first", "second"):
        run_one(driver, name, PROMPT, prompt_logprobs=0)
    run_one(driver, "third", PROMPT)
    assert (cached(driver, "second"), cached(driver, "third")) == (0, 8)


# ---- How many slots there are


def test_slots_are_one_for_each_row_and_a_share_of_the_memory() -> None:
    """With half of the memory, the snapshots take as much as the pages of 64 tokens."""
    assert states_config(snapshot_share=0.5).pools[1].pages == 2 + 64 // 8
    assert states_config(snapshot_share=0.0).pools[1].pages == 2
    assert states_config(prefix_cache=False).pools[1] == SlotPool(2, unit=2)


def test_a_sequence_without_snapshots_stays_in_its_slot() -> None:
    driver = Driver(states_config(prefix_cache=False))
    driver.submit(request("a", prompt=PROMPT, max_tokens=20))
    held = set[tuple[int, ...]]()
    while driver.engine.has_work:
        driver.step()
        running = driver.scheduler.lanes[0].running
        held |= {tuple(page for page in seq.pages[1] if page >= 0) for seq in running}
    assert held - {()} == {(0,)}


def test_a_running_sequence_holds_at_most_one_state_more() -> None:
    """That behind its last whole page."""
    driver = Driver(states_config(size=1))
    driver.submit(request("a", prompt=PROMPT, max_tokens=30, ignore_eos=True))
    most = 0
    while driver.engine.has_work:
        driver.step()
        pool = driver.scheduler.lanes[0].slot_pools[0]
        most = max(most, sum(pool.holders(slot) > 0 for slot in range(pool.num_pages)))
    assert most == 2


def test_snapshots_make_room_for_rows() -> None:
    """Slots that rows need are taken from snapshots, and every row still gets one."""
    driver = Driver(states_config(max_batch=3, cache_tokens=200, snapshot_share=0.0))
    for number in range(12):
        prompt = (number, *PROMPT[: 3 + number % 5])
        driver.submit(request(str(number), prompt=prompt, max_tokens=9, ignore_eos=True))
    running = 0
    while driver.engine.has_work:
        driver.step()
        running = max(running, len(driver.scheduler.lanes[0].running))
    assert running == 3


def test_a_burst_of_next_turns_fills_all_rows() -> None:
    """Each goes on from a snapshot, and no row waits for a slot that another one can do without."""
    sizes = {"page_size": 16, "step_tokens": 64, "cache_tokens": 2048, "max_context": 256}
    config = states_config(256, max_batch=8, snapshot_interval=1024, **sizes)
    driver = Driver(replace(config, pools=(config.pools[0], replace(config.pools[1], pages=10))))
    for number in range(8):
        run_one(driver, f"first {number}", (number,) * 33, max_tokens=2, ignore_eos=True)
    for number in range(8):
        prompt = (*(number,) * 33, 1, 2, 3)
        driver.submit(request(str(number), prompt=prompt, max_tokens=60, ignore_eos=True))
    for _ in range(12):
        driver.step()
    assert len(driver.scheduler.lanes[0].running) == 8
    driver.run()
    assert sum(cached(driver, str(number)) == 32 for number in range(8)) >= 6


@pytest.mark.parametrize("step_tokens", [32, 128])
def test_one_long_prompt_does_not_drive_out_the_snapshots_of_others(step_tokens: int) -> None:
    sizes = {"page_size": 4, "step_tokens": step_tokens, "cache_tokens": 800, "max_context": 256}
    config = states_config(64, snapshot_interval=16, snapshot_answers=False, **sizes)
    driver = Driver(replace(config, pools=(config.pools[0], replace(config.pools[1], pages=10))))
    for number in range(5):
        run_one(driver, f"first {number}", (number,) * 13, max_tokens=1)
    run_one(driver, "long", tuple(n % 60 for n in range(180)), max_tokens=1)
    for number in range(5):
        run_one(driver, str(number), (*(number,) * 13, 1, 2), max_tokens=1)
    assert sum(cached(driver, str(number)) == 12 for number in range(5)) >= 3


@pytest.mark.parametrize("share", [0.0, None])
def test_a_deterministic_engine_never_lacks_a_slot(share: float | None) -> None:
    """A row that follows a grammar waits for the host while another one goes on from its state.

    Whoever would share the last slot waits, since nothing is preempted.
    """
    sizes = {"max_batch": 3, "page_size": 4, "cache_tokens": 400}
    config = states_config(deterministic=True, snapshot_share=share, snapshot_interval=64, **sizes)
    prompt = tuple(range(5, 13))
    second = request("b", prompt=(*prompt, 1, 2), max_tokens=12, ignore_eos=True)
    alone = Driver(config, executables_differ=True)
    alone.submit(second)
    alone.run()
    driver = Driver(config, executables_differ=True)
    driver.submit(request("c", prompt=(1, 2, 3), max_tokens=40, ignore_eos=True))
    for _ in range(3):
        driver.step()
    first = request("a", prompt=prompt, max_tokens=12, structure=SOME)
    driver.submit(replace(first, grammar=ANY_TOKEN, eos_ids=(END,)))
    waiting = next(iter(driver.scheduler.waiting))
    while waiting.settled < 8:
        driver.step()
    driver.submit(second)
    driver.run()
    assert driver.scheduler.preemptions == 0
    assert driver.results["b", 0].tokens == alone.results["b", 0].tokens


# ---- What is refused


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"snapshot_interval": 7}, "must be a multiple of 2, as of pages"),
        ({"snapshot_interval": 6, "deterministic": True, "step_tokens": 16}, "multiple of 4"),
        ({"snapshot_share": 0.95}, "between 0 and 0.9"),
        ({"snapshot_share": 0.5, "prefix_cache": False}, "found by the prefix cache"),
        ({"snapshot_share": 0.0, "page_exchange": True}, "64 tokens with --snapshot-share 0 has"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        states_config(**changes)


@pytest.mark.parametrize("options", [{"snapshot_share": 0.3}, {"snapshot_interval": 64}])
def test_snapshots_of_a_model_without_states_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no layer of the model has a recurrent state"):
        check_snapshots(EngineOptions(**options), has_states=False)
