"""KV transfer between engines, on devices that a person can check by hand."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE
from jaxserve.engine.host.kv_export import KVExport, PagesToSend, wanted_pages
from jaxserve.engine.host.kv_import import KVImport
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import ConfigError, DeadlineError, EngineError
from jaxserve.request import Request
from tests.jaxserve.engine.host.driver import (
    PROMPT,
    Driver,
    ScriptedSpeculation,
    config_of,
    request,
)
from tests.jaxserve.engine.host.test_states import states_config

LONG = tuple(range(30, 70))  # 40 tokens
Windows = tuple[int | None, ...]


def exchange_driver(
    page_size: int = 4, windows: Windows = (None,), num_pages: int = 64, **changes: int
) -> Driver:
    return Driver(
        config_of(
            num_pages=num_pages, windows=windows, page_size=page_size, page_exchange=True, **changes
        )
    )


def begin_export(
    here: Driver, asked: Request, start: int = 0, page_size: int = 4
) -> tuple[KVExport, list[PagesToSend | None]]:
    """Begin an export; return it and the list that its deliveries go to."""
    delivered: list[PagesToSend | None] = []
    return here.engine.transfers.export(asked, start, page_size, delivered.append), delivered


def segments_of(
    here: Driver, asked: Request, start: int = 0, page_size: int = 4
) -> list[KVSegment]:
    """Run a request and return all segments of its prompt, each taken as it comes."""
    found: list[KVSegment | None] = []

    def take(outgoing: PagesToSend | None) -> None:
        found.append(outgoing and outgoing.to_host())

    here.submit(asked)
    here.engine.transfers.export(asked, start, page_size, take)
    here.run()
    assert found.pop() is None
    return [segment for segment in found if segment]


def install(there: Driver, arriving: KVImport, segments: list[KVSegment]) -> int:
    """Stage and install segments; return how many pages are new there."""
    new = 0
    for segment in segments:
        for staged in arriving.stage(segment, timeout=0):
            new += arriving.install(staged)
            there.scheduler.check_invariants()
    return new


def transfer_prompt(here: Driver, there: Driver, prompt: tuple[int, ...] = LONG) -> KVImport:
    """Compute a prompt here and bring its pages there."""
    arriving = there.engine.transfers.receive(prompt)
    asked = request("prefill", prompt, max_tokens=1)
    install(there, arriving, segments_of(here, asked, arriving.cached, there.config.page_size))
    return arriving


def cached_tokens_of(there: Driver, prompt: tuple[int, ...] = LONG, name: str = "decode") -> int:
    """Run a request and return the tokens that it finds cached; the driver checks its answer."""
    there.submit(request(name, prompt, max_tokens=6))
    there.run()
    times = there.results[name, 0].times
    assert times
    return times.cached


@pytest.mark.parametrize("start", [29, 30, 2**32 - 1])
def test_a_peer_that_claims_more_than_the_prompt_gets_nothing(start: int) -> None:
    """No page behind the end of the prompt is sent, whatever start a peer sends."""
    assert all(pages.stop <= 8 and not pages for pages in wanted_pages(config_of(), 30, start, 4))


@pytest.mark.parametrize("windows", [(None,), (9, None), (9,), (None, 3)], ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [(4, 4), (4, 8), (8, 4), (3, 5), (16, 2), (2, 16)])
def test_the_next_request_with_the_prompt_finds_it(
    ours: int, theirs: int, windows: Windows
) -> None:
    """The hit has the whole pages of both sides; the receiver computes the last token."""
    here = exchange_driver(ours, windows)
    there = exchange_driver(theirs, windows)
    transfer_prompt(here, there)
    reach = min(40 // ours * ours, 39) // theirs * theirs
    assert there.engine.transfers.receive(LONG).cached == reach > 0
    assert cached_tokens_of(there) == reach


def test_a_prompt_of_a_model_with_states_comes_with_the_state_behind_its_last_page() -> None:
    """The request goes on from it."""
    here, there = (Driver(replace(states_config(), page_exchange=True)) for _ in range(2))
    arriving = there.engine.transfers.receive(PROMPT)
    segments = segments_of(here, request("prefill", PROMPT, max_tokens=1), 0, 2)
    assert [(each.group, each.start, each.stop) for each in segments if each.group] == [(1, 7, 8)]
    install(there, arriving, segments)
    assert there.engine.transfers.receive(PROMPT).cached == 8
    assert cached_tokens_of(there, PROMPT) == 8


def test_a_state_is_read_before_the_pages_of_other_prompts() -> None:
    """There are many pages, and few slots; nothing of a prompt is of use without its state."""
    here = Driver(replace(states_config(), page_exchange=True))
    both = [request(name, (*PROMPT, ord(name)), max_tokens=1) for name in "ab"]
    for asked in both:
        here.submit(asked)
    here.run()
    slots = here.engine.transfers.slots
    taken = [slots.acquire(blocking=False) for _ in range(SEGMENTS_ON_DEVICE)]
    exports = [begin_export(here, asked, page_size=2) for asked in both]
    read = list[int]()
    for _ in taken:
        slots.release()
        here.engine.transfers.advance()
        read = [sent.group for _, delivered in exports for sent in delivered if sent]
        if len(read) == 2:
            break
    assert read == [1, 1]


def test_an_export_ends_when_the_state_is_gone() -> None:
    """The receiver can use nothing of the prompt any more."""
    here = Driver(replace(states_config(), page_exchange=True))
    asked = request("a", PROMPT, max_tokens=1)
    here.submit(asked)
    here.run()
    here.scheduler.lanes[0].slot_pools[0].drop_idle()
    for _ in range(SEGMENTS_ON_DEVICE):
        assert here.engine.transfers.slots.acquire(blocking=False)
    exported, delivered = begin_export(here, asked, page_size=2)
    assert delivered == [None] and exported.missing > 1


def test_an_export_of_states_to_other_pages_is_refused() -> None:
    here = Driver(replace(states_config(), page_exchange=True))
    with pytest.raises(EngineError, match="as many as here, 2"):
        begin_export(here, request("a", PROMPT), page_size=4)


def test_without_the_state_nothing_of_a_prompt_is_of_use() -> None:
    here, there = (Driver(replace(states_config(), page_exchange=True)) for _ in range(2))
    segments = segments_of(here, request("prefill", PROMPT, max_tokens=1), 0, 2)
    install(there, there.engine.transfers.receive(PROMPT), [s for s in segments if not s.group])
    assert cached_tokens_of(there, PROMPT) == 0


@pytest.mark.parametrize("stop", [7, 10, 12])
def test_a_state_that_ends_no_page_of_the_prompt_is_left_out(stop: int) -> None:
    """Within a page, at the token that is computed here, and behind the prompt."""
    there = Driver(replace(states_config(), page_exchange=True))
    arriving = there.engine.transfers.receive(PROMPT)
    numbers = np.zeros((1, 1, 1, 3 * stop), np.float32)
    assert install(there, arriving, [KVSegment(1, stop - 1, numbers)]) == 0


def test_cached_is_what_admission_finds_and_changes_nothing() -> None:
    driver = exchange_driver(lanes=2)
    assert driver.engine.transfers.receive(LONG).cached == 0
    cached_tokens_of(driver, LONG[:21], "one")
    idle = [list(cache.pool._idle) for lane in driver.scheduler.lanes for cache in lane.caches]
    assert [driver.engine.transfers.receive(LONG[:n]).cached for n in (1, 4, 5, 20, 21, 40)] == [
        0,
        0,
        4,
        16,
        20,
        20,
    ]
    assert driver.engine.transfers.receive(LONG, salt="another").cached == 0
    assert idle == [
        list(cache.pool._idle) for lane in driver.scheduler.lanes for cache in lane.caches
    ]
    assert cached_tokens_of(driver, LONG, "two") == 20


def test_a_salt_is_kept_apart() -> None:
    here = exchange_driver()
    there = exchange_driver()
    segments = segments_of(here, request("a", LONG, salt="x", max_tokens=1))
    install(there, there.engine.transfers.receive(LONG, "x"), segments)
    assert (
        there.engine.transfers.receive(LONG, "x").cached,
        there.engine.transfers.receive(LONG).cached,
    ) == (36, 0)


def test_only_what_the_other_side_lacks_is_read() -> None:
    here = exchange_driver()
    there = exchange_driver()
    cached_tokens_of(there, LONG[:14], "before")
    arriving = there.engine.transfers.receive(LONG)
    assert arriving.cached == 12
    segments = segments_of(here, request("a", LONG, max_tokens=1), start=12)
    assert segments[0].start == 12 and segments[-1].stop == 36
    assert install(there, arriving, segments) == arriving.installed == 6


def test_nothing_is_read_where_nothing_is_lacking() -> None:
    here = exchange_driver()
    exported, delivered = begin_export(here, request("a", LONG), start=36)
    assert delivered == [None] and exported.missing == 0


def test_of_a_window_what_the_next_token_sees() -> None:
    """Token 32, the first that the other engine with pages of 8 computes, sees 24 and on.

    The group without a window is sent whole.
    """
    here = exchange_driver(4, windows=(None, 9))
    segments = segments_of(here, request("a", LONG, max_tokens=1), page_size=8)
    assert {segment.group: segment.start for segment in reversed(segments)} == {0: 0, 1: 24}
    assert {segment.group: segment.stop for segment in segments} == {0: 32, 1: 32}


def test_pages_leave_while_the_prompt_is_computed() -> None:
    """Each step's pages are delivered as soon as the step has ended, in order."""
    here = exchange_driver(step_tokens=8)
    asked = request("a", LONG, max_tokens=1)
    here.submit(asked)
    exported, delivered = begin_export(here, asked)
    sizes = []
    for _ in range(5):
        here.step()
        sizes.append(exported.missing)
        for outgoing in delivered:
            assert outgoing
            outgoing.drop()
    assert sizes == [9, 7, 5, 3, 1]
    assert [outgoing.start for outgoing in delivered if outgoing] == [0, 4, 8, 12, 16, 20, 24, 28]


def test_what_is_cached_leaves_without_a_step() -> None:
    here = exchange_driver()
    cached_tokens_of(here, LONG, "before")
    exported, delivered = begin_export(here, request("never submitted", LONG))
    assert exported.missing == 0 and delivered[-1] is None and not here.engine.has_work


def test_few_segments_are_on_the_devices_at_once() -> None:
    here = exchange_driver(step_tokens=64, max_context=64, page_size=1)
    cached_tokens_of(here, LONG, "before")
    exported, delivered = begin_export(here, request("a", LONG), page_size=1)
    assert len(delivered) == SEGMENTS_ON_DEVICE, "39 pages of a token are 16 + 16 + 4 + 1 + 1 + 1"
    assert exported.missing == 2
    taken = delivered[1]
    assert taken and taken.to_host().stop == 32
    with pytest.raises(
        EngineError, match="at token 16 of page group 0 was taken or dropped before"
    ):
        taken.to_host()
    taken.drop()
    here.engine.transfers.advance()
    assert exported.missing == 1
    for outgoing in delivered[2:]:
        assert outgoing
        outgoing.drop()
    here.engine.transfers.advance()
    assert exported.missing == 0 and delivered[-1] is None


def test_windows_leave_before_other_pages_in_whatever_order_exports_began() -> None:
    """Nothing of a prompt is found without its window, whose pages are the first to be evicted."""
    here = exchange_driver(
        step_tokens=64, max_context=64, page_size=1, windows=(None, 9), num_pages=128
    )
    first = LONG
    second = tuple(range(80, 120))
    for prompt in (first, second):
        cached_tokens_of(here, prompt, str(prompt))
    _, one = begin_export(here, request("a", first), page_size=1)
    exported, other = begin_export(here, request("b", second), page_size=1)
    assert [(o.group, o.start) for o in one if o] == [
        (1, 31),
        (1, 35),
        (0, 0),
        (0, 16),
    ] and not other
    for outgoing in list(one):
        assert outgoing
        outgoing.drop()
        here.engine.transfers.advance()
    assert [(o.group, o.start) for o in other if o] == [(1, 31), (1, 35)], (
        "before what is left of the first"
    )
    assert [(o.group, o.start) for o in one[4:] if o] == [(0, 32), (0, 36)]
    assert exported.missing == 39


def test_evicted_pages_are_missing_and_no_export_waits_for_them() -> None:
    here = exchange_driver(num_pages=12)
    exported, delivered = begin_export(here, request("a", LONG))
    assert delivered == [None] and exported.missing == 9
    cached_tokens_of(here, LONG, "before")
    cached_tokens_of(here, tuple(range(70, 90)), "another")
    exported, delivered = begin_export(here, request("a", LONG))
    assert 0 < exported.missing < 9 and delivered[-1] is None


def test_an_export_ends_with_its_request() -> None:
    here = exchange_driver(step_tokens=8)
    asked = request("a", LONG)
    exported, delivered = begin_export(here, replace(asked, id="other"))
    assert delivered == [None]
    here.submit(asked)
    exported, delivered = begin_export(here, asked)
    here.step()
    here.step()
    here.abort("a")
    here.run()
    assert exported.missing == 7 and delivered[-1] is None


def test_a_closed_export_reads_no_more() -> None:
    here = exchange_driver(step_tokens=8)
    asked = request("a", LONG)
    here.submit(asked)
    exported, delivered = begin_export(here, asked)
    here.step()
    here.step()
    here.engine.transfers.close(exported)
    here.engine.transfers.close(exported)
    here.run()
    assert [outgoing.start for outgoing in delivered if outgoing] == [
        0,
        4,
    ] and None not in delivered


# ---- Imports


def test_idle_pages_make_room_and_a_sequence_s_do_not() -> None:
    """The running sequence has 6 of 16 pages, and its next page is still to come."""
    here = exchange_driver()
    there = exchange_driver(num_pages=16)
    cached_tokens_of(there, tuple(range(20)), "before")
    there.submit(request("runs", tuple(range(70, 90)), max_tokens=12))
    there.step()
    there.step()
    arriving = transfer_prompt(here, there)
    assert arriving.installed == 9 and there.engine.transfers.receive(LONG).cached == 36
    there.run()
    assert there.results["runs", 0].times
    there.submit(request("long", LONG, max_tokens=20))
    there.run()


def test_a_full_pool_takes_the_beginning() -> None:
    """A running sequence has 4 of 8 pages: what arrives first takes the others and stays."""
    here = exchange_driver()
    there = exchange_driver(num_pages=8)
    there.submit(request("runs", tuple(range(70, 84)), max_tokens=2))
    there.step()
    arriving = transfer_prompt(here, there)
    assert arriving.installed == 4 and there.engine.transfers.receive(LONG).cached == 16
    there.run()


def test_eviction_shortens_what_arrived_from_its_end() -> None:
    here = exchange_driver()
    there = exchange_driver(num_pages=12)
    transfer_prompt(here, there)
    assert there.engine.transfers.receive(LONG).cached == 36
    cached_tokens_of(there, tuple(range(70, 84)), "another")
    assert 0 < there.engine.transfers.receive(LONG).cached < 36


def test_what_would_never_be_found_is_not_installed() -> None:
    here = exchange_driver()
    there = exchange_driver()
    segments = segments_of(here, request("a", LONG, max_tokens=1))
    arriving = there.engine.transfers.receive(LONG)
    assert install(there, arriving, segments[1:]) == 0
    there.scheduler.check_invariants()


def test_twice_is_once() -> None:
    here = exchange_driver()
    there = exchange_driver()
    segments = segments_of(here, request("a", LONG, max_tokens=1))
    arriving, other = (there.engine.transfers.receive(LONG) for _ in range(2))
    assert install(there, arriving, segments + segments) == 9
    assert install(there, other, segments) == 0


def test_segments_of_a_longer_prompt_end_with_this_one_s_pages() -> None:
    here = exchange_driver()
    there = exchange_driver(8)
    segments = segments_of(here, request("a", LONG, max_tokens=1))
    assert install(there, there.engine.transfers.receive(LONG[:21]), segments) == 2
    assert cached_tokens_of(there, LONG[:21]) == 16


def test_a_gap_between_segments_loses_the_page_around_it() -> None:
    """Pages of a sliding window need no page before them."""
    here = exchange_driver(2, windows=(16,))
    there = exchange_driver(4, windows=(16,))
    segments = segments_of(here, request("a", LONG[:20], max_tokens=1), page_size=4)
    cut = [
        KVSegment(0, start, segments[0].k[:, start : start + 2])
        for start in (0, 2, 4, 8, 10, 12, 14)
    ]
    assert install(there, there.engine.transfers.receive(LONG[:20]), cut) == 3
    assert cached_tokens_of(there, LONG[:20]) == 4


def test_the_lane_that_has_most_of_it_gets_the_rest() -> None:
    here = exchange_driver()
    there = exchange_driver(lanes=2)
    there.submit(request("one", tuple(range(70, 80)), max_tokens=8))
    there.submit(request("two", LONG[:14], max_tokens=2))
    there.run()
    assert transfer_prompt(here, there).cached == 12
    assert cached_tokens_of(there) == 36


def test_an_upload_waits_for_a_slot_and_gives_it_back() -> None:
    here = exchange_driver()
    there = exchange_driver()
    segment = segments_of(here, request("a", LONG, max_tokens=1))[0]
    arriving = there.engine.transfers.receive(LONG)
    under_way = [arriving.stage(segment, timeout=0) for _ in range(SEGMENTS_ON_DEVICE)]
    for stage in under_way:
        next(stage)
    with pytest.raises(
        DeadlineError, match=r"4 KV segments were on the devices for 0\.01 s, and no more may be"
    ):
        next(arriving.stage(segment, timeout=0.01))
    under_way[0].close()
    assert next(arriving.stage(segment, timeout=0)).pages.start == 0


def test_drafts_of_the_device_do_not_trust_what_arrived() -> None:
    """The draft model filled every page before, with other tokens; it must fill them again."""
    here = exchange_driver()
    there = Driver(exchange_driver(num_pages=12).config, speculation=ScriptedSpeculation(3))
    for name, prompt in (("before", tuple(range(40))), ("after", tuple(range(50, 70)))):
        there.submit(request(name, prompt, salt="w", max_tokens=6))
        there.run()
    assert len(there.scheduler.lanes[0]._filled_by_drafter) > 9
    arriving = there.engine.transfers.receive(LONG, "w")
    install(there, arriving, segments_of(here, request("a", LONG, salt="w", max_tokens=1)))
    there.submit(request("drafts", LONG, salt="w", max_tokens=6))
    there.run()
    times = there.results["drafts", 0].times
    assert times and times.cached == 36 and times.drafted > 0


# ---- Refusals


def test_an_engine_that_exchanges_none() -> None:
    driver = Driver(config_of())
    with pytest.raises(ConfigError, match="this engine exchanges no pages with others"):
        driver.engine.transfers.export(request(), 0, 4, lambda outgoing: None)
    with pytest.raises(ConfigError, match="this engine exchanges no pages with others"):
        driver.engine.transfers.receive(LONG)


@pytest.mark.parametrize(("start", "page_size"), [(-1, 4), (0, 0)])
def test_an_export_of_nonsense(start: int, page_size: int) -> None:
    problem = f"an export was asked for from token {start} on, to pages of {page_size} tokens"
    with pytest.raises(EngineError, match=problem):
        begin_export(exchange_driver(), request(), start, page_size)


@pytest.mark.parametrize(
    ("options", "embeds", "problem"),
    [
        (
            EngineOptions(deterministic=True),
            False,
            "--deterministic is given; pages of another engine have the bits",
        ),
        (
            EngineOptions(prefix_cache=False),
            False,
            "--no-prefix-cache is given; pages of another engine are found",
        ),
        (EngineOptions(), True, "a model that embeds exchanges no pages"),
    ],
)
def test_what_pages_cannot_be_exchanged_with(
    options: EngineOptions, embeds: bool, problem: str
) -> None:
    def resolved(options: EngineOptions) -> bool:
        return resolve(
            options, max_positions=64, lanes=1, affordable_tokens=4096, embeds=embeds
        ).page_exchange

    assert not resolved(options)
    with pytest.raises(ConfigError, match=problem):
        resolved(replace(options, page_exchange=True))


# ---- Corner cases


def test_what_is_left_of_a_segment_does_not_keep_it_alive() -> None:
    there = exchange_driver(8)
    arriving = there.engine.transfers.receive(LONG)
    keys = np.zeros((1, 12, 1, 3))
    list(arriving.stage(KVSegment(0, 0, keys), timeout=0))
    assert arriving._tails[0].k.base is None


def test_a_request_that_is_aborted_before_its_first_step_ends_its_export() -> None:
    """The abort itself ends the export, since no step follows."""
    here = exchange_driver()
    asked = request("prefill", LONG, max_tokens=1)
    here.submit(asked)
    _, delivered = begin_export(here, asked)
    here.engine.abort("prefill")
    here.engine.step()
    assert delivered == [None] and not here.engine.has_work


def test_without_its_window_nothing_of_a_prompt_is_sent() -> None:
    """The window is evicted while all slots are taken: pages of the other group are not sent."""
    here = Driver(config_of(num_pages=64, windows=(None, 9), page_size=4, page_exchange=True))
    for _ in range(SEGMENTS_ON_DEVICE):
        assert here.engine.transfers.slots.acquire(blocking=False)
    asked = request("a", LONG, max_tokens=1)
    here.submit(asked)
    exported, delivered = begin_export(here, asked)
    here.run()
    assert delivered == [] and exported.missing
    here.scheduler.lanes[0].caches[1].pool.drop_idle()
    here.engine.transfers.slots.release()
    here.engine.transfers.advance()
    assert delivered.pop() is None and len(delivered) <= 1 and exported.missing


def test_a_read_that_fails_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    here = exchange_driver()
    cached_tokens_of(here)

    def fail(*_: object) -> None:
        raise RuntimeError("a failpoint")

    with monkeypatch.context() as broken:
        broken.setattr(here.runner, "read_pages", fail)
        for _ in range(SEGMENTS_ON_DEVICE + 1):
            with pytest.raises(RuntimeError, match="a failpoint"):
                begin_export(here, request("a", LONG))
    exported, delivered = begin_export(here, request("a", LONG))
    here.run()
    for outgoing in delivered:
        if outgoing:
            outgoing.drop()
    here.engine.transfers.advance()
    assert delivered[0] and delivered[-1] is None and exported.missing == 0
