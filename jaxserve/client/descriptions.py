"""Descriptions of the server and its model as frozen dataclasses."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that is served.

    Attributes:
        name: Name by which clients ask for it.
        architecture: Architecture of the checkpoint, such as LlamaForCausalLM.
        parameters: Number of parameters.
        dtype: Dtype of activations, and of weights that are not quantized.
        vocab_size: Number of token ids.
        max_context: The longest prompt plus output, in tokens.
        eos_token_ids: Tokens that end a text.
        has_chat_template: True if it takes conversations.
        embedding_dimensions: Numbers in an embedding; 0 for a model that generates.
        weights: What weights are kept in: a dtype, or a quantized format such as "int8".
        weight_bytes: Bytes on one device, by part of the model and dtype.
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
    """The server and its engine.

    Attributes:
        versions: Versions by package.
        mesh: Sizes of the mesh by axis.
        device_kind: Kind of the devices, as jax names it.
        buckets: Shapes of steps that the server compiles.
        max_batch: Rows that run together in one lane.
        step_tokens: The most tokens that a step computes in one lane.
        page_size: Tokens in one page of the KV cache.
        cache_tokens: Tokens that the KV caches of all lanes hold.
        limits: Bounds on requests, by the name of their flag.
        uptime_seconds: Seconds since the server became ready.
        compiles_after_ready: Compiles that a request has waited for; should be 0.
        kv: What the pages of the KV cache hold.
        background_compiles: Compiles beside requests since the server became ready.
        buckets_pending: Shapes that are not compiled yet, in whose place larger ones serve.
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
    background_compiles: int
    buckets_pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Work that runs and waits on the server now.

    Attributes:
        running: Choices that run.
        waiting: Choices that wait.
        waiting_tokens: Prompt tokens of the choices that wait.
        pages_used: Pages of the KV caches that requests hold.
        pages_total: Pages of the KV caches.
        requests: Requests that were accepted and have not ended.
        queue_seconds: Seconds that a new request would wait until it runs.
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    requests: int
    queue_seconds: float
