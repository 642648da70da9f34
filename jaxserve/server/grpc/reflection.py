"""Reflection under both of its names.

grpcio-reflection has v1alpha only, and clients ask for v1 first. The messages of the two are the
same on the wire.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection, reflection_pb2

OLDER = reflection.SERVICE_NAME
SERVICE = OLDER.replace("v1alpha", "v1")
SERVICES = frozenset({OLDER, SERVICE})


def add_reflection(server: aio.Server, names: Iterable[str]) -> None:
    """Let clients ask a server for the descriptions of these services, and of reflection."""
    servicer: Any = reflection.ReflectionServicer([*names, *SERVICES], pool=_pool())

    async def describe(requests: AsyncIterable[Any], context: Any) -> AsyncGenerator[Any]:
        async for request in requests:
            for response in servicer.ServerReflectionInfo(iter((request,)), context):
                yield response

    handler = grpc.stream_stream_rpc_method_handler(
        describe,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in SERVICES:
        methods = {"ServerReflectionInfo": handler}
        handlers = grpc.method_handlers_generic_handler(name, methods)
        server.add_generic_rpc_handlers((handlers,))


def _pool() -> descriptor_pool.DescriptorPool:
    """Return the pool of all descriptors, with that of reflection's v1."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileContainingSymbol(SERVICE)
    except KeyError:
        older = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(older)
        newer = text_format.MessageToString(older).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(newer, FileDescriptorProto()))
    return pool
