"""Step plans as bytes: every field survives, and forged or repeated orders are refused."""

from dataclasses import asdict, replace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cluster import compatibility
from jaxserve.cluster.compatibility import difference, facts_of_start, plan_format
from jaxserve.cluster.encoding import (
    buckets_from_proto,
    compile_message,
    plan_from_bytes,
    plan_to_bytes,
)
from jaxserve.cluster.message_auth import MessageChain, proof_of
from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import BucketPlan
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.plan import Admission, LanePlan, StepKind, StepOutput, StepPlan
from jaxserve.engine.row_fields import ROW_BYTES, ROW_FIELDS, RowField
from jaxserve.errors import EngineError
from jaxserve.sharding.mesh import MeshSpec
from tests.fake_runner import FakeRunner
from tests.jaxserve.engine.host.driver import config_of, request

KINDS = st.sampled_from(get_args(StepKind))
SMALL = st.integers(0, 2**31 - 1)
SIGNED = st.integers(-1, 2**31 - 1)
COLUMN = st.lists(SMALL, max_size=8)
TOKENS = st.lists(SIGNED, max_size=12)
NUMBER = st.floats(allow_nan=False)
IDS = st.lists(SMALL, max_size=6).map(tuple)

lanes = st.builds(
    LanePlan,
    sequences=st.lists(st.integers(0, 2**63), max_size=8),
    rows=COLUMN,
    starts=COLUMN,
    sizes=COLUMN,
    samples=COLUMN,
    tokens=TOKENS,
    targets=TOKENS,
    fresh=st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL), max_size=5),
    logprobs=st.booleans(),
    masks=st.lists(st.tuples(SMALL, st.binary(max_size=8)), max_size=3),
)
admissions = st.builds(
    Admission,
    lane=SMALL,
    row=SMALL,
    length=SMALL,
    tables=st.lists(st.lists(SIGNED, max_size=5).map(tuple), max_size=3).map(tuple),
    packed=st.binary(min_size=ROW_BYTES, max_size=ROW_BYTES),
    prompt_tokens=SMALL,
    bias=st.lists(st.tuples(SMALL, NUMBER), max_size=4).map(tuple),
    allowed=st.none() | IDS,
    history=st.none() | IDS,
)
plans = st.builds(
    StepPlan,
    number=st.integers(0, 2**63),
    kind=KINDS,
    lanes=st.lists(lanes, min_size=1, max_size=3).map(tuple),
    admissions=st.lists(admissions, max_size=3).map(tuple),
    steps=st.integers(1, 64),
)


def over_the_wire(plan: StepPlan) -> StepPlan:
    return plan_from_bytes(plan_to_bytes(plan))


@given(plans)
def test_any_plan_comes_back(plan: StepPlan) -> None:
    assert over_the_wire(plan) == plan


ADMISSION = Admission(0, 1, 4, ((7, 8),), bytes(ROW_BYTES), 9, ((3, 0.5),), (1, 2), None)
PLAN = StepPlan(
    number=3,
    kind="prefill",
    lanes=(LanePlan([5], [1], [4], [2], [1], [10, 11], [11, 0], [(0, 1, 1, 8)]),),
    admissions=(ADMISSION,),
)


@pytest.mark.parametrize(
    "change",
    [
        {"number": "3"},
        {"number": 3.5},
        {"kind": "guess"},
        {"lanes": {}},
        {"lanes": [{"rows": [1, None]}]},
        {"lanes": [{"logprobs": 1}]},
        {"lanes": [{"fresh": [[0, 1, 1]]}]},
        {"lanes": [{"masks": [[1, "mask"]]}]},
        {"admissions": [asdict(ADMISSION) | {"packed": bytes(ROW_BYTES - 1)}]},
        {"admissions": [asdict(ADMISSION) | {"tables": [[7.5]]}]},
        {"admissions": [asdict(ADMISSION) | {"bias": [[3, "0.5"]]}]},
        {"admissions": [{"lane": 0, "row": 1}]},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(change: dict[str, Any]) -> None:
    plan = asdict(PLAN)
    assert plan_from_bytes(msgspec.msgpack.encode(plan)) == PLAN
    with pytest.raises(EngineError, match="a plan of the leader cannot be read: "):
        plan_from_bytes(msgspec.msgpack.encode(plan | change))


@given(st.data())
def test_damaged_bytes_are_refused_or_a_plan(data: st.DataObject) -> None:
    """The chain of orders notices any change before; what passes has the right types."""
    sent = bytearray(plan_to_bytes(PLAN))
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(sent)))
    try:
        found = plan_from_bytes(bytes(sent[:length]))
    except EngineError:
        return
    assert over_the_wire(found) == found


def test_bytes_that_are_no_text_are_refused() -> None:
    damaged = plan_to_bytes(PLAN).replace(b"prefill", b"\xff" * 7)
    with pytest.raises(EngineError, match="a plan of the leader cannot be read: "):
        plan_from_bytes(damaged)


def test_builds_with_other_fields_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with one row field more is refused, though both state the same version."""
    start = MeshSpec(), "float32", "float32", EngineOptions()
    before = facts_of_start(*start)
    assert difference(before, facts_of_start(*start)) is None
    monkeypatch.setattr(
        compatibility, "ROW_FIELDS", ROW_FIELDS | {"typical_p": RowField(np.float32)}
    )
    after = facts_of_start(*start)
    assert difference(before, after) == (
        f"the format of step plans: {plan_format()} there, "
        f"{before['the format of step plans']} here"
    )
    older = {name: value for name, value in before.items() if "plans" not in name}
    assert difference(before, older) == (
        f"the format of step plans: none there, {before['the format of step plans']} here"
    )


def test_hosts_whose_kernels_have_other_instructions_refuse_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = MeshSpec(), "float32", "float32", EngineOptions()
    monkeypatch.setattr(compatibility, "instructions_here", lambda: "avx512")
    here = facts_of_start(*start)
    monkeypatch.setattr(compatibility, "instructions_here", lambda: None)
    there = facts_of_start(*start)
    said = "instructions of the kernels for a CPU: none there, avx512 here"
    assert difference(here, there) == said


def test_buckets_come_back() -> None:
    options = EngineOptions(prefer="throughput")
    buckets = BucketPlan.of(
        resolve(options, max_positions=4096, lanes=2, affordable_tokens=10**6)
    ).buckets
    assert len(buckets) > 10 and buckets_from_proto(compile_message(buckets)) == buckets


class SerializingRunner:
    """A device that gets every plan by way of its bytes."""

    def __init__(self, runner: FakeRunner):
        self.runner = runner

    def launch(self, plan: StepPlan) -> StepOutput:
        return self.runner.launch(over_the_wire(plan))

    def collect(self, plan: StepPlan, handle: StepOutput) -> StepOutput:
        return self.runner.collect(plan, handle)

    def close(self) -> None:
        self.runner.close()


def test_a_device_that_knows_the_bytes_alone_gives_the_same_tokens() -> None:
    """Requests have penalties, biases, masks and windows, and some are preempted."""
    config = config_of(num_pages=9, windows=(None, 6))
    params = (
        {"max_tokens": 12},
        {"repetition_penalty": 1.3, "n": 2},
        {"logit_bias": {5: 3.0}, "logprobs": 2},
        {"allowed_token_ids": (4, 9, 17, 80), "prompt_logprobs": 1},
        {"seed": 2**64 - 1, "min_tokens": 3, "stop_token_ids": (7, 8)},
    )
    events_of_runs = []
    for wrap in (lambda runner: runner, SerializingRunner):
        engine = Engine(
            Scheduler(config, fingerprint="x"), wrap(FakeRunner(config)), clock=lambda: 1.0
        )
        for i, changes in enumerate(params):
            engine.submit(request(f"r{i}", prompt=tuple(range(i, i + 9)), **changes))
        events = []
        while engine.has_work:
            events += engine.step()
        assert {event.request_id for event in events if event.finish} == {
            f"r{i}" for i in range(len(params))
        }
        events_of_runs.append(events)
    assert events_of_runs[0] == events_of_runs[1]


SECRET = b"s" * 32


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_what_was_sent_passes(orders: list[bytes]) -> None:
    leader = MessageChain(SECRET)
    follower = MessageChain(SECRET)
    for number, order in enumerate(orders, start=1):
        sent = leader.add(order)
        assert sent[0] == number
        follower.check(sent[0], order, sent[1])


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=2, max_size=5, unique=True), st.data())
def test_a_changed_lost_repeated_or_foreign_order_is_noticed(
    orders: list[bytes], data: st.DataObject
) -> None:
    leader = MessageChain(SECRET)
    follower = MessageChain(SECRET)
    sealed = [(*leader.add(order), order) for order in orders]
    at = data.draw(st.integers(0, len(orders) - 2))
    for number, digest, order in sealed[:at]:
        follower.check(number, order, digest)
    number, digest, order = sealed[at]
    later = sealed[at + 1]
    position = data.draw(st.integers(0, len(order) - 1))
    changed = order[:position] + bytes([order[position] ^ 1]) + order[position + 1 :]
    stranger = MessageChain(b"t" * 32)
    foreign = [stranger.add(o) for o in orders[: at + 1]][-1][1]
    wrong = data.draw(
        st.sampled_from(
            [
                (number, changed, digest),
                (later[0], later[2], later[1]),  # one was lost
                (number, later[2], later[1]),
                (number + 1, order, digest),
                (number, order, foreign),
                (number, order, b""),
            ]
        )
    )
    with pytest.raises(EngineError, match="order"):
        follower.check(*wrong)


def test_a_proof_is_of_one_host_and_secret() -> None:
    assert len({proof_of(SECRET, 1), proof_of(SECRET, 2), proof_of(b"t" * 32, 1)}) == 3


def test_the_size_of_a_decode_step() -> None:
    """A step has the number of bytes that docs/pods.md states.

    256 rows decode at positions of a few thousand, and 4 of them begin a page.
    """
    rows = list(range(256))
    lane = LanePlan(rows, rows, [4000 + row for row in rows], [1] * 256, [1] * 256, [-1] * 256)
    lane = replace(lane, fresh=[(0, row, 63, 10_000 + row) for row in range(4)])
    assert 1500 < len(plan_to_bytes(StepPlan(10**6, "decode", (lane,), ()))) < 2500
