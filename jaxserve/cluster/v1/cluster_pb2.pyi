from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("hello", "facts", "beat", "farewell")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    facts: Facts
    beat: Beat
    farewell: Farewell
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., facts: _Optional[_Union[Facts, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("host", "proof")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    host: int
    proof: bytes
    def __init__(self, host: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Facts(_message.Message):
    __slots__ = ("stage", "names", "values")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    stage: str
    names: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stage: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[str]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("exit_code", "reason")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    reason: str
    def __init__(self, exit_code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("number", "order", "digest")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    order: bytes
    digest: bytes
    def __init__(self, number: _Optional[int] = ..., order: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("agreed", "refused", "compile", "plan", "stop", "told", "compile_beside", "install")
    AGREED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    COMPILE_BESIDE_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    agreed: Agreed
    refused: Refused
    compile: Compile
    plan: bytes
    stop: Stop
    told: Told
    compile_beside: Compile
    install: Compile
    def __init__(self, agreed: _Optional[_Union[Agreed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., compile: _Optional[_Union[Compile, _Mapping]] = ..., plan: _Optional[bytes] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., told: _Optional[_Union[Told, _Mapping]] = ..., compile_beside: _Optional[_Union[Compile, _Mapping]] = ..., install: _Optional[_Union[Compile, _Mapping]] = ...) -> None: ...

class Agreed(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    def __init__(self, stage: _Optional[str] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: str
    def __init__(self, value: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("problem",)
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    problem: str
    def __init__(self, problem: _Optional[str] = ...) -> None: ...

class Compile(_message.Message):
    __slots__ = ("buckets",)
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    def __init__(self, buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("kind", "rows", "tokens", "steps", "drafts")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    rows: int
    tokens: int
    steps: int
    drafts: int
    def __init__(self, kind: _Optional[str] = ..., rows: _Optional[int] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., drafts: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("exit_code",)
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    def __init__(self, exit_code: _Optional[int] = ...) -> None: ...
