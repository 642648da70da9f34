"""Convert step plans and buckets to protobuf messages and back.

A plan holds all that a follower needs to launch the leader's step: numbers and lists of numbers.
"""

from collections.abc import Iterable
from itertools import batched, chain
from typing import cast

from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.plan import Admission, LanePlan, StepKind, StepPlan


def plan_to_proto(plan: StepPlan) -> pb.StepPlan:
    return pb.StepPlan(
        number=plan.number,
        kind=plan.kind,
        lanes=map(_lane_to_proto, plan.lanes),
        admissions=map(_admission_to_proto, plan.admissions),
        steps=plan.steps,
    )


def plan_from_proto(message: pb.StepPlan) -> StepPlan:
    return StepPlan(
        number=message.number,
        kind=cast(StepKind, message.kind),
        lanes=tuple(map(_lane_from_proto, message.lanes)),
        admissions=tuple(map(_admission_from_proto, message.admissions)),
        steps=message.steps,
    )


def buckets_to_proto(buckets: Iterable[Bucket]) -> pb.Compile:
    return pb.Compile(
        buckets=[
            pb.Bucket(
                kind=bucket.kind,
                rows=bucket.rows,
                tokens=bucket.tokens,
                steps=bucket.steps,
                drafts=bucket.drafts,
            )
            for bucket in buckets
        ]
    )


def buckets_from_proto(message: pb.Compile) -> tuple[Bucket, ...]:
    return tuple(
        Bucket(cast(StepKind, bucket.kind), bucket.rows, bucket.tokens, bucket.steps, bucket.drafts)
        for bucket in message.buckets
    )


def _lane_to_proto(lane: LanePlan) -> pb.LanePlan:
    return pb.LanePlan(
        sequences=lane.sequences,
        rows=lane.rows,
        starts=lane.starts,
        sizes=lane.sizes,
        samples=lane.samples,
        tokens=lane.tokens,
        targets=lane.targets,
        # Four numbers for each page, one after the other: a message for each would be slower.
        fresh=chain.from_iterable(lane.fresh),
        logprobs=lane.logprobs,
        masks=[pb.Mask(row=row, words=words) for row, words in lane.masks],
    )


def _lane_from_proto(lane: pb.LanePlan) -> LanePlan:
    return LanePlan(
        sequences=list(lane.sequences),
        rows=list(lane.rows),
        starts=list(lane.starts),
        sizes=list(lane.sizes),
        samples=list(lane.samples),
        tokens=list(lane.tokens),
        targets=list(lane.targets),
        fresh=[cast(tuple[int, int, int, int], entry) for entry in batched(lane.fresh, 4)],
        logprobs=lane.logprobs,
        masks=[(mask.row, mask.words) for mask in lane.masks],
    )


def _admission_to_proto(a: Admission) -> pb.Admission:
    return pb.Admission(
        lane=a.lane,
        row=a.row,
        length=a.length,
        tables=[pb.Pages(pages=pages) for pages in a.tables],
        packed=a.packed,
        prompt_tokens=a.prompt_tokens,
        bias_ids=[token for token, _ in a.bias],
        bias_values=[value for _, value in a.bias],
        allowed=None if a.allowed is None else pb.Tokens(ids=a.allowed),
        history=None if a.history is None else pb.Tokens(ids=a.history),
    )


def _admission_from_proto(a: pb.Admission) -> Admission:
    return Admission(
        lane=a.lane,
        row=a.row,
        length=a.length,
        tables=tuple(tuple(table.pages) for table in a.tables),
        packed=a.packed,
        prompt_tokens=a.prompt_tokens,
        bias=tuple(zip(a.bias_ids, a.bias_values, strict=True)),
        allowed=tuple(a.allowed.ids) if a.HasField("allowed") else None,
        history=tuple(a.history.ids) if a.HasField("history") else None,
    )
