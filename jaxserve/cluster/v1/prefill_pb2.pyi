from jaxserve.cluster.v1 import cluster_pb2 as _cluster_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("facts", "dtypes", "token_ids", "salt", "start", "page_size", "priority", "client")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    facts: _cluster_pb2.Facts
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    start: int
    page_size: int
    priority: int
    client: str
    def __init__(self, facts: _Optional[_Union[_cluster_pb2.Facts, _Mapping]] = ..., dtypes: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ..., start: _Optional[int] = ..., page_size: _Optional[int] = ..., priority: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("ticket", "group", "start", "arrays")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    group: int
    start: int
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(self, ticket: _Optional[bytes] = ..., group: _Optional[int] = ..., start: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("facts", "dtypes", "weight_digests")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    facts: _cluster_pb2.Facts
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    weight_digests: str
    def __init__(self, facts: _Optional[_Union[_cluster_pb2.Facts, _Mapping]] = ..., dtypes: _Optional[_Iterable[str]] = ..., weight_digests: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("waiting_tokens",)
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    waiting_tokens: int
    def __init__(self, waiting_tokens: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
