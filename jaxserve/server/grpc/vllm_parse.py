"""From messages of vllm.grpc.engine to the service's requests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as pb

from jaxserve.errors import RequestError
from jaxserve.prompts import Prompt
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.grpc.fields import set_fields
from jaxserve.structure import Structure

# Fields of requests that are honoured. Any other field that is set is an error, so that nothing is
# dropped in silence; this includes fields of later versions.
GENERATE_FIELDS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})
EMBED_FIELDS = frozenset({"request_id", "tokenized"})
# Sampling parameters with the same name and meaning in SamplingParams. As in vLLM, 0 and an empty
# list of a field without presence mean that it is not set.
SAME = frozenset(
    """
    temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
    max_tokens min_tokens stop stop_token_ids ignore_eos n logprobs prompt_logprobs seed
    logit_bias
    """.split()
)
RENAMED: Mapping[str, str] = MappingProxyType({"include_stop_str_in_output": "include_stop"})
# Settings of the conversion to text, which the router does: the answers here are token ids.
ROUTERS_OWN = frozenset({"skip_special_tokens", "spaces_between_special_tokens"})
# Kinds of Structure by vLLM's names, which differ for one: a grammar is of kind lark.
STRUCTURES = frozenset({"json_schema", "json_object", "regex", "choice", "grammar"})
SAMPLING_FIELDS = SAME | RENAMED.keys() | ROUTERS_OWN | STRUCTURES
NO_TAGS = (
    "asks for structural tags; json_schema, json_object, regex, choice and grammar are "
    "supported (leave it out)"
)
NO_REMOTE_CACHE = (
    "asks for KV caches of other servers, which this server does not fetch (leave it out)"
)
TEXT_ONLY = "is no text; only text is served (leave it out)"
ONE_RANK = (
    "names a rank; the server spreads requests itself, and presents itself as one rank "
    "(leave it out)"
)
NOT_HONOURED = "is not honoured here (leave it out)"
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "structural_tag": NO_TAGS,
        "kv_transfer_params": NO_REMOTE_CACHE,
        "kv_transfer_params_json": NO_REMOTE_CACHE,
        "mm_inputs": TEXT_ONLY,
        "extra_mm_inputs": TEXT_ONLY,
        "media_refs": TEXT_ONLY,
        "data_parallel_rank": ONE_RANK,
    }
)


def parse_generate(request: pb.GenerateRequest, **fields: Any) -> IncomingRequest:
    """Parse a GenerateRequest; `fields` are further fields of IncomingRequest.

    Raises RequestError for a field that is wrong or not honoured.
    """
    _check_honoured(request, GENERATE_FIELDS, "")
    prompt, prompt_field = _parse_prompt(request)
    with sampling_path():
        params = _parse_sampling(request.sampling_params)
    return IncomingRequest(
        prompt=prompt,
        prompt_field=prompt_field,
        params=params,
        request_id=request.request_id,
        **fields,
    )


def parse_embed(request: pb.EmbedRequest) -> tuple[Prompt, str]:
    """Return the prompt of an EmbedRequest, and its path in the message."""
    _check_honoured(request, EMBED_FIELDS, "")
    if not request.HasField("tokenized"):
        raise RequestError("tokenized", "is missing; set the token ids of the input")
    return list(request.tokenized.input_ids), "tokenized.input_ids"


@contextmanager
def sampling_path() -> Iterator[None]:
    """Give errors of sampling parameters that are raised inside their path in the message."""
    try:
        yield
    except RequestError as error:
        if error.field.partition("[")[0] in SAME | STRUCTURES:
            error.under("sampling_params")
        raise


def _parse_prompt(request: pb.GenerateRequest) -> tuple[Prompt, str]:
    """Return the prompt and its path in the message.

    The token ids count; `original_text` beside them is for people to read.
    """
    match request.WhichOneof("input"):
        case "tokenized":
            return list(request.tokenized.input_ids), "tokenized.input_ids"
        case "text":
            return request.text, "text"
    raise RequestError("input", "is missing; set tokenized or text")


def _parse_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Return the sampling parameters that were set; RequestError for one that is out of range."""
    _check_honoured(message, SAMPLING_FIELDS, "sampling_params.")
    found: dict[str, Any] = {}
    for name, value in set_fields(message):
        if name in ROUTERS_OWN:
            continue
        if name in STRUCTURES:
            if name == "choice":
                value = list(value.choices)
            kind = "lark" if name == "grammar" else name
            found["structure"] = Structure.of(kind, value, name)
        else:
            found[RENAMED.get(name, name)] = value
    return SamplingParams(**found)


def _check_honoured(message: Message, known: frozenset[str], path: str) -> None:
    for field, _ in message.ListFields():
        if field.name not in known:
            raise RequestError(path + field.name, REASONS.get(field.name, NOT_HONOURED))
