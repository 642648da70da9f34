"""Encode step plans as bytes, and buckets as protobuf messages, and decode both.

A plan holds all that a follower needs to launch the leader's step. Its dataclasses are encoded by
their own fields, as MessagePack, so that a new field needs no code here.
"""

from collections.abc import Iterable
from typing import cast

from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder

from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.plan import StepKind, StepPlan
from jaxserve.errors import EngineError

_ENCODER = Encoder()
_DECODER = Decoder(StepPlan)


def plan_to_bytes(plan: StepPlan) -> bytes:
    return _ENCODER.encode(plan)


def plan_from_bytes(data: bytes) -> StepPlan:
    """Return the plan; EngineError where the bytes are damaged or a field is not of its type."""
    try:
        return _DECODER.decode(data)
    except (MsgspecError, UnicodeDecodeError) as error:
        raise EngineError(f"a plan of the leader cannot be read: {error}") from None


def compile_message(buckets: Iterable[Bucket]) -> pb.Compile:
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
