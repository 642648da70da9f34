"""What the server answers, as plain frozen values. Times are seconds, log-probabilities natural
logarithms.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token and its log-probability under the model's own distribution. token: what it spells,
    for people.
    """

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob(Logprob):
    """A token of a text. top: the most probable ones in its place, as many as were asked for."""

    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one choice went, by the server's clock."""

    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    preemptions: int
    padding_share: float
    bucket: str
    drafted_tokens: int
    accepted_tokens: int
    verifications: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens: of the prompt, those of them that were cached, and those of all choices."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinish:
    """How one choice ended. finish_reason: "stop", "length", "abort", or "tool_calls" where it
    stopped after calls.

    stopped_by: the stop string or the token id that ended it; None for neither. seed: given, or
    drawn by the server.
    """

    index: int
    finish_reason: str
    stopped_by: str | int | None
    seed: int
    timings: Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model calls. arguments: JSON text of an object, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """News of a call. index: of the call in its choice. id and name come with the first; arguments
    join.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(ChoiceFinish):
    """One finished choice. token_ids has the token that ended it; logprobs is empty where nobody
    asked.

    Of a conversation: reasoning_content, what the model thought before; tool_calls.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All choices of a prompt or a conversation, by index. prompt_logprobs: from the second token
    on, if asked for.
    """

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """The first event of a stream: the prompt was computed."""

    request_id: str
    prompt_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """A part of the prompt's log-probabilities; start: position of the first entry."""

    start: int
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What became final of one choice. text may be empty, and never ends in half a character."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of a stream that was not cut short."""

    choices: tuple[ChoiceFinish, ...]
    usage: Usage


Event = PromptInfo | PromptLogprobs | Delta | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of a given text. logprobs: of its tokens from the second on; total_logprob:
    their sum.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    total_logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """embeddings: of the texts, in their order; vectors of length 1, their numbers float32."""

    request_id: str
    embeddings: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """Token ids as the model would read them. prompt: the text, or the rendered conversation."""

    token_ids: tuple[int, ...]
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that is served. max_context: the longest prompt plus output, in tokens.

    embedding_dimensions: numbers of an embedding; 0: the model generates. weights: what they are
    kept in: dtype, or a form such as int8. weight_bytes: on one device, by part and dtype.
    """

    name: str
    architecture: str
    parameters: int
    dtype: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    embedding_dimensions: int
    weights: str
    weight_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The server: versions by package, mesh sizes by axis, compiled buckets, limits by the name of
    their flag.
    """

    versions: dict[str, str]
    mesh: dict[str, int]
    device_kind: str
    buckets: tuple[str, ...]
    max_batch: int
    step_tokens: int
    page_size: int
    cache_tokens: int
    limits: dict[str, float]
    uptime_seconds: float
    compiles_after_ready: int
    kv: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What runs and waits now: choices, prompt tokens of those that wait, pages, and requests in
    flight.
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    requests: int
