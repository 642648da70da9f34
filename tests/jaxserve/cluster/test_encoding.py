"""Step plans as bytes: every field survives, and forged or repeated orders are refused."""

from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cluster.encoding import (
    buckets_from_proto,
    buckets_to_proto,
    plan_from_proto,
    plan_to_proto,
)
from jaxserve.cluster.message_auth import MessageChain, proof_of
from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import BucketPlan
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.plan import Admission, LanePlan, StepKind, StepOutput, StepPlan
from jaxserve.engine.row_fields import ROW_BYTES
from jaxserve.errors import EngineError
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
    return plan_from_proto(pb.StepPlan.FromString(plan_to_proto(plan).SerializeToString()))


@given(plans)
def test_any_plan_comes_back(plan: StepPlan) -> None:
    assert over_the_wire(plan) == plan


@pytest.mark.parametrize("kind", [StepPlan, LanePlan, Admission])
def test_every_field_travels(kind: type) -> None:
    """A new field of a plan has to be added to the message, too."""
    message = {StepPlan: pb.StepPlan, LanePlan: pb.LanePlan, Admission: pb.Admission}[
        kind
    ].DESCRIPTOR
    names = {field.name for field in message.fields} - {"bias_ids", "bias_values"}
    assert names | ({"bias"} if kind is Admission else set()) == {
        field.name for field in fields(kind)
    }


def test_buckets_come_back() -> None:
    options = EngineOptions(prefer="throughput")
    buckets = BucketPlan.of(
        resolve(options, max_positions=4096, lanes=2, affordable_tokens=10**6)
    ).buckets
    assert len(buckets) > 10 and buckets_from_proto(buckets_to_proto(buckets)) == buckets


class Replaying:
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
    told = []
    for wrap in (lambda runner: runner, Replaying):
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
        told.append(events)
    assert told[0] == told[1]


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
    """256 rows decode at positions of a few thousand, and 4 of them begin a page: the number of
    bytes that docs/pods.md states.
    """
    rows = list(range(256))
    lane = LanePlan(rows, rows, [4000 + row for row in rows], [1] * 256, [1] * 256, [-1] * 256)
    lane = replace(lane, fresh=[(0, row, 63, 10_000 + row) for row in range(4)])
    assert (
        1500 < len(plan_to_proto(StepPlan(10**6, "decode", (lane,), ())).SerializeToString()) < 2500
    )
