"""Fields that this server's messages do not have: they are refused, and cost little."""

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.grpc import fields
from jaxserve.server.grpc.fields import MOST_UNKNOWN, check_known
from jaxserve.v1 import inference_pb2 as pb

VARINT = b"\xa0\x9c\x01\x01"  # field 2500 with the value 1


def inside(data: bytes) -> pb.GenerateRequest:
    """Return a request whose sampling parameters have these bytes."""
    request = pb.GenerateRequest()
    request.sampling.MergeFromString(data)
    return request


def test_a_field_is_named_by_its_place_and_number() -> None:
    check_known(inside(b""))
    with pytest.raises(RequestError, match=r"^sampling has a field of number 2500, which"):
        check_known(inside(VARINT))


def test_many_fields_are_counted_and_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "UnknownFieldSet", None)
    data = VARINT * (MOST_UNKNOWN // len(VARINT) + 1)
    for request in (pb.GenerateRequest.FromString(data), inside(data)):
        with pytest.raises(RequestError, match=r"^request has 41\d\d bytes of fields that"):
            check_known(request)
