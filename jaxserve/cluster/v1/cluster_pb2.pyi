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
    __slots__ = ("agreed", "refused", "compile", "plan", "stop")
    AGREED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    agreed: Agreed
    refused: Refused
    compile: Compile
    plan: StepPlan
    stop: Stop
    def __init__(self, agreed: _Optional[_Union[Agreed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., compile: _Optional[_Union[Compile, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Agreed(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    def __init__(self, stage: _Optional[str] = ...) -> None: ...

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

class StepPlan(_message.Message):
    __slots__ = ("number", "kind", "lanes", "admissions", "steps")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: str
    lanes: _containers.RepeatedCompositeFieldContainer[LanePlan]
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    steps: int
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[str] = ..., lanes: _Optional[_Iterable[_Union[LanePlan, _Mapping]]] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ..., steps: _Optional[int] = ...) -> None: ...

class LanePlan(_message.Message):
    __slots__ = ("sequences", "rows", "starts", "sizes", "samples", "tokens", "targets", "fresh", "logprobs", "masks")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    fresh: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bool
    masks: _containers.RepeatedCompositeFieldContainer[Mask]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ..., fresh: _Optional[_Iterable[int]] = ..., logprobs: _Optional[bool] = ..., masks: _Optional[_Iterable[_Union[Mask, _Mapping]]] = ...) -> None: ...

class Mask(_message.Message):
    __slots__ = ("row", "words")
    ROW_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    row: int
    words: bytes
    def __init__(self, row: _Optional[int] = ..., words: _Optional[bytes] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("lane", "row", "length", "tables", "packed", "prompt_tokens", "bias_ids", "bias_values", "allowed", "history")
    LANE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    lane: int
    row: int
    length: int
    tables: _containers.RepeatedCompositeFieldContainer[Pages]
    packed: bytes
    prompt_tokens: int
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    allowed: Tokens
    history: Tokens
    def __init__(self, lane: _Optional[int] = ..., row: _Optional[int] = ..., length: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[Pages, _Mapping]]] = ..., packed: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., allowed: _Optional[_Union[Tokens, _Mapping]] = ..., history: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class Pages(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pages: _Optional[_Iterable[int]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...
