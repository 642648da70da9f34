"""Any traffic on two engines, with segments of prompts that travel between them or are lost."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE
from jaxserve.engine.host.kv_export import KVExport, PagesToSend
from jaxserve.engine.host.kv_import import KVImport
from jaxserve.errors import ConfigError, DeadlineError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fake_groups import FakeGroup
from tests.jaxserve.engine.host.driver import Driver, ScriptedSpeculation
from tests.jaxserve.engine.host.test_scheduler_properties import (
    BASES,
    ODD_ENDS,
    STATE_SIZES,
    WINDOWS,
    Groups,
    requests,
    submit,
)

# What layers keep: plain pages, other sizes in each group, K alone, and states.
GROUPS = (
    *(tuple(map(FakeGroup, windows)) for windows in WINDOWS),
    (FakeGroup(heads=2, key=4, value=3), FakeGroup(5, layers=2, key=7)),
    (FakeGroup(), FakeGroup(slot=True)),
    (FakeGroup(), FakeGroup(5), FakeGroup(slot=True)),
)


@st.composite
def configs(draw: st.DrawFn, groups: Groups, page_size: int) -> EngineConfig:
    max_batch = draw(st.integers(1, 4))
    options = EngineOptions(
        max_batch=max_batch,
        step_tokens=draw(st.integers(max_batch, 16)),
        page_size=page_size,
        cache_tokens=draw(st.integers(8, 60)),
        max_context=draw(st.integers(20, 40)),
        page_exchange=True,
    )
    options = replace(options, snapshot_share=0.5 if any(g.slot for g in groups) else None)
    return resolve(
        options,
        max_positions=40,
        lanes=draw(st.integers(1, 3)),
        affordable_tokens=1000,
        windows=[group.window for group in groups if not group.slot],
        states=[draw(STATE_SIZES) for group in groups if group.slot],
    )


@st.composite
def engines(draw: st.DrawFn) -> tuple[Groups, EngineConfig, EngineConfig]:
    """Draw two engines of one model; with states, pages of both have as many tokens."""
    groups = draw(st.sampled_from(GROUPS))
    sizes = [draw(st.integers(1, 8)) for _ in range(2)]
    if any(group.slot for group in groups):
        sizes = sizes[:1] * 2
    try:
        one, two = (draw(configs(groups, size)) for size in sizes)
    except ConfigError:  # no room for a snapshot
        assume(False)
        raise
    return groups, one, two


@dataclass
class Transfer:
    """A prompt on its way from one driver to the other.

    lost: every so many of its segments never arrive; 0: none.
    """

    here: Driver
    there: Driver
    arriving: KVImport
    lost: int
    delivered: deque[PagesToSend | None]
    exported: KVExport | None = None
    count: int = 0

    def pass_on(self, limit: int) -> None:
        """Bring up to `limit` deliveries to the other engine."""
        while self.delivered and limit:
            outgoing = self.delivered.popleft()
            limit -= 1
            if outgoing is None:
                assert not self.delivered, "a delivery after the end"
                return
            self.count += 1
            if self.lost and self.count % self.lost == 0:
                outgoing.drop()
                continue
            segment = outgoing.to_host()
            # What the other engine reads for its own exports may have all slots on its devices.
            with suppress(DeadlineError):
                for staged in self.arriving.stage(segment, timeout=0):
                    self.arriving.install(staged)
                    self.there.scheduler.check_invariants()
        self.here.engine.transfers.advance()


PROMPTS = st.sampled_from(BASES).flatmap(lambda base: st.integers(2, 16).map(lambda n: base[:n]))
SIDES = st.integers(0, 1)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), SIDES, requests()),
    st.tuples(st.just("steps"), SIDES, st.integers(1, 6)),
    st.tuples(st.just("flush"), SIDES, st.none()),
    st.tuples(
        st.just("prefill"),
        SIDES,
        st.tuples(PROMPTS, st.sampled_from(["", "", "w"]), st.integers(0, 3)),
    ),
    st.tuples(
        st.just("prefill"),
        SIDES,
        st.tuples(PROMPTS, st.sampled_from(["", "", "w"]), st.integers(0, 3)),
    ),
    st.tuples(st.just("pass on"), SIDES, st.integers(1, 5)),
    st.tuples(st.just("pass on"), SIDES, st.integers(1, 5)),
    st.tuples(st.just("close"), SIDES, st.none()),
)


class Pair:
    """Two engines of one model, and the transfers under way in both directions."""

    def __init__(self, drivers: list[Driver]):
        self.drivers = drivers
        self.transfers: list[list[Transfer]] = [[], []]  # by the side that they come from
        self._names = iter(range(1000))

    def play(self, action: str, side: int, argument: Any) -> None:
        driver = self.drivers[side]
        under_way = self.transfers[side]
        if action == "submit":
            params = SamplingParams(**argument["params"])
            name = f"r{next(self._names)}"
            submit(
                driver, Request(**{**argument, "id": name, "params": params, "eos_ids": ODD_ENDS})
            )
        elif action == "steps":
            for _ in range(argument):
                driver.step()
        elif action == "flush":
            driver.scheduler.flush_cache()
        elif action == "prefill":
            under_way.append(self._prefill(side, *argument))
        elif action == "pass on" and under_way:
            under_way[argument % len(under_way)].pass_on(argument)
        elif action == "close" and under_way and (exported := under_way[0].exported):
            driver.engine.transfers.close(exported)
        driver.scheduler.check_invariants()

    def _prefill(self, side: int, prompt: tuple[int, ...], salt: str, lost: int) -> Transfer:
        here = self.drivers[side]
        there = self.drivers[1 - side]
        params = SamplingParams(seed=1, max_tokens=1)
        request = Request(
            id=f"p{next(self._names)}", prompt=prompt, params=params, salt=salt, eos_ids=ODD_ENDS
        )
        submit(here, request)
        transfer = Transfer(
            here, there, there.engine.transfers.receive(prompt, salt), lost, deque()
        )
        cached = transfer.arriving.cached
        size = there.config.page_size
        transfer.exported = here.engine.transfers.export(
            request, cached, size, transfer.delivered.append
        )
        return transfer

    def finish(self) -> None:
        for driver in self.drivers:
            driver.run()
        while any(transfer.delivered for side in self.transfers for transfer in side):
            for transfer in self.transfers[0] + self.transfers[1]:
                transfer.pass_on(3)
        for driver in self.drivers:
            driver.run()
            assert not driver.engine.transfers._exports
            slots = driver.engine.transfers.slots
            assert [slots.acquire(blocking=False) for _ in range(SEGMENTS_ON_DEVICE + 1)].count(
                True
            ) == SEGMENTS_ON_DEVICE


@settings(max_examples=300, derandomize=True)
@given(
    engines(),
    st.sampled_from([0, 23]),
    st.sampled_from([0, 3]),
    st.lists(ACTIONS, min_size=4, max_size=24),
)
def test_any_traffic(
    both: tuple[Groups, EngineConfig, EngineConfig],
    spoilt_step: int,
    drafts: int,
    actions: list[tuple[str, int, Any]],
) -> None:
    """Drivers check every page that can be found, and every token against the naive loop.

    Salts with a "w" draft on the device, and some steps are not finite.
    """

    def spoils(number: int, lane: int, row: int) -> bool:
        return spoilt_step > 0 and (number * 7 + lane * 3 + row) % spoilt_step == 0

    def driver(config: EngineConfig) -> Driver:
        by_device = drafts and any(pool.window is None for pool in config.pools)
        speculation = ScriptedSpeculation(drafts) if by_device else None
        return Driver(config, speculation=speculation, spoils=spoils, groups=groups)

    groups, *own = both
    pair = Pair(list(map(driver, own)))
    for action in actions:
        pair.play(*action)
    pair.finish()
