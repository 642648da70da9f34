"""python docs/make_api.py: writes docs/api.md from the .proto files, the errors and the limits.

Needs grpcio-tools (an extra of development). A test compares the file with what this writes.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    SourceCodeInfo,
)
from grpc_tools import protoc
from starlette.routing import Route

from jaxserve import errors
from jaxserve.server.core.embedding import MAX_INPUTS
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.agents.messages import blocks as of_blocks
from jaxserve.server.http.agents.messages import types as of_messages
from jaxserve.server.http.agents.messages.tools import CustomTool as MessagesTool
from jaxserve.server.http.agents.responses import item_types as of_items
from jaxserve.server.http.agents.responses import tool_types as of_tools
from jaxserve.server.http.agents.responses import types as of_responses
from jaxserve.server.http.app import new_app
from jaxserve.server.http.other_fields import IGNORED, ONLY
from jaxserve.server.http.types import (
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Sampling,
    TokenizeBody,
)
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens

REFUSED_BLOCKS = of_blocks.REFUSED
OTHER_ITEMS = of_items.OTHER_ITEMS
# Objects in the bodies of agents, by the paths of the endpoints.
DOORS: dict[str, tuple[type[Listed], ...]] = {
    "/v1/responses": (
        of_responses.ResponsesBody,
        of_responses.ReasoningOptions,
        of_responses.TextOptions,
        of_responses.TextFormat,
        of_items.Message,
        of_items.TextPart,
        of_items.ReasoningItem,
        of_items.FunctionCall,
        of_items.CustomCall,
        of_items.CallOutput,
        of_tools.FunctionTool,
        of_tools.CustomTool,
        of_tools.CustomFormat,
        of_tools.NamespaceTool,
    ),
    "/v1/responses/input_tokens": (of_responses.CountBody,),
    "/v1/messages": (
        of_messages.MessagesBody,
        of_messages.Thinking,
        of_messages.OutputConfig,
        of_messages.ToolChoice,
        of_blocks.Message,
        of_blocks.SystemMessage,
        of_blocks.TextBlock,
        of_blocks.ThinkingBlock,
        of_blocks.RedactedThinkingBlock,
        of_blocks.ToolUseBlock,
        of_blocks.ToolResultBlock,
        MessagesTool,
    ),
    "/v1/messages/count_tokens": (of_messages.CountBody,),
}

ROOT = Path(__file__).parent.parent
PROTOS = ("inference", "common", "admin")
MESSAGE, ENUM, SERVICE = 4, 5, 6  # field numbers of FileDescriptorProto
FIELD, NESTED = 2, 3  # of DescriptorProto
TYPES = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}  # fmt: skip

ROUTES = {
    "/v1/completions": "one prompt or several, as text or token ids; `stream`, `echo`, `logprobs`",
    "/v1/chat/completions": "a conversation, by the checkpoint's chat template; `stream`, "
    "`logprobs`, `tools`",
    "/v1/embeddings": "one text or several, as text or token ids, of a model that embeds; "
    "`encoding_format`",
    "/v1/responses": "OpenAI's responses: input items to output items; `stream`, `tools`, "
    "`previous_response_id`",
    "/v1/responses/input_tokens": "number of tokens of such an input",
    "/v1/responses/{id}": "a stored response; DELETE drops it",
    "/v1/responses/{id}/input_items": "its input; `limit`, `order`, `after`",
    "/v1/messages": "Anthropic's messages: blocks to blocks; `stream`, `tools`, `thinking`",
    "/v1/messages/count_tokens": "number of tokens of such a conversation",
    "/v1/models": "the model that is served",
    "/v1/models/{id:path}": "the same by name",
    "/tokenize": "`prompt` or `messages` to `tokens`",
    "/detokenize": "`tokens` to `prompt`",
    "/tokenizer_info": "names of BOS, EOS and so on, and the chat template, for who renders "
    "conversations",
    "/version": "of jaxserve",
    "/metrics": "Prometheus",
    "/health": "200 when ready, 503 otherwise; without a token",
    "/live": "the metrics, pages and compiled steps once a second, as server-sent events of JSON",
    "/ping": "the same as /health",
    "/": "the page, for people; without a token, which it asks for",
    "/page/{path:path}": "what belongs to it",
}

OTHER_METHODS = (("GET", "/v1/responses"), ("DELETE", "/v1/responses/{id}"))

HEAD = """# jaxserve.v1 and its HTTP face

Written by `python docs/make_api.py` from `jaxserve/v1/*.proto`, the tree of errors and the table
of limits: change those, not this file. What every field may be is said with it; a value out of its
bounds, and a field that the server does not know, is `INVALID_ARGUMENT` with the field's path, and
nothing else is disturbed by it.

"""


def document() -> str:
    parts = (services(), status_map(), limits(), http(), agents(), messages())
    return HEAD + "\n".join(line for part in parts for line in part)


def descriptors() -> dict[str, FileDescriptorProto]:
    """The .proto files, with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all.binpb"
        includes = [f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
        names = [f"jaxserve/v1/{name}.proto" for name in PROTOS]
        code = protoc.main(
            ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={out}", *names]
        )
        assert code == 0, "protoc failed"
        found = FileDescriptorSet.FromString(out.read_bytes())
    return {Path(file.name).stem: file for file in found.file}


def comment(file: FileDescriptorProto, *path: int) -> str:
    """Return the comment before the declaration at this path, as one line."""
    for location in file.source_code_info.location:
        if list(location.path) == list(path):
            return _joined(location)
    return ""


def _joined(location: SourceCodeInfo.Location) -> str:
    paragraphs = location.leading_comments.strip().split("\n\n")
    return " ".join(" ".join(line.strip() for line in part.splitlines()) for part in paragraphs)


def services() -> Iterator[str]:
    for file in descriptors().values():
        for i, service in enumerate(file.service):
            yield f"## {service.name}\n\n{comment(file, SERVICE, i)}\n"
            yield "| call | takes | returns | |\n|---|---|---|---|"
            for j, method in enumerate(service.method):
                takes, returns = (
                    name.rsplit(".", 1)[1] for name in (method.input_type, method.output_type)
                )
                stream = "stream of " if method.server_streaming else ""
                yield (
                    f"| {method.name} | {takes} | {stream}{returns} | "
                    f"{comment(file, SERVICE, i, 2, j)} |"
                )
            yield ""


def status_map() -> Iterator[str]:
    yield "## Statuses\n"
    yield (
        "An error is a google.rpc.Status with exactly one ErrorInfo (domain `jaxserve`, the "
        "reason below), BadRequest"
    )
    yield (
        "with the field's path where a field is wrong, RetryInfo where a later try may do, and "
        "`grpc-retry-pushback-ms`,"
    )
    yield (
        "which is -1 where it may not. Over HTTP it is OpenAI's error object with the reason in "
        "small letters, `param` and"
    )
    yield "`Retry-After`.\n"
    yield "| gRPC | HTTP | reason | when |\n|---|---|---|---|"
    for kind in _walk(errors.JaxserveError):
        if kind not in (errors.ModelError, errors.MemoryLimitError):  # a start that fails
            yield f"| {kind.code} | {kind.http_status} | {kind.reason} | {_when(kind)} |"
    yield ""


def _walk(kind: type[errors.JaxserveError]) -> Iterator[type[errors.JaxserveError]]:
    for inner in kind.__subclasses__():
        if inner.__module__ == errors.__name__:
            if inner is not errors.UnavailableError:
                yield inner
            yield from _walk(inner)


def _when(kind: type) -> str:
    """From the tree in the docstring of the errors."""
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        if words and words[0] == kind.__name__:
            rest = [w for w in words[1:] if w not in (kind.code, str(kind.http_status))]
            return (
                " ".join(rest)
                or "a bug: the text is generic, with an id that is in the server's log"
            )
    return ""


def limits() -> Iterator[str]:
    yield "## Limits\n"
    yield "On by default; each is a flag of `jaxserve serve`.\n"
    yield "| flag | default | of what |\n|---|---|---|"
    for flag, default, what in Limits.table():
        yield f"| `{flag}` | {default:,} | {what} |"
    yield ""


def http() -> Iterator[str]:
    """Routes and fields, from the application itself."""
    yield "## OpenAI's API over HTTP\n"
    yield (
        "The same service. A field that is null counts as left out; one that is not below is "
        "an error that names it."
    )
    yield (
        "`X-Request-Timeout` (seconds, such as 30 or 0.5) is the deadline; `x-request-id`, of at "
        "most 128 bytes, is sent back. Bodies are sent without Content-Encoding. Messages are "
        "joined, or get another role, where the chat template insists ([roles](clients.md#roles)). "
        "Errors are OpenAI's error"
    )
    yield "objects, in the middle of a stream as an event. Bounds are those of SamplingParams;"
    yield f"{MAX_PROMPTS} prompts a call, or {MAX_INPUTS:,} texts to embed.\n"
    yield "| method | path | |\n|---|---|---|"
    app = new_app(Readiness(), BearerTokens(), Limits(), bytes)
    for route in app.routes:
        assert isinstance(route, Route)
        (method,) = (route.methods or set()) - {"HEAD"}
        # Beside these are routes that say why there is none, and a second one of a path.
        if route.path in ROUTES and (method, route.path) not in OTHER_METHODS:
            yield f"| {method} | {route.path} | {ROUTES[route.path]} |"
    yield ""
    own = (
        CompletionBody.model_fields.keys() - Sampling.model_fields.keys(),
        (ChatBody.model_fields.keys() - Sampling.model_fields.keys()),
    )
    for name, fields in (
        ("both kinds of completion", Sampling.model_fields),
        ("/v1/completions", own[0]),
        ("/v1/chat/completions", own[1]),
        ("/v1/embeddings", EmbeddingBody.model_fields),
        ("/tokenize", TokenizeBody.model_fields),
    ):
        yield f"- {name}: " + ", ".join(f"`{field}`" for field in sorted(fields))
    yield ""
    yield (
        "/v1/embeddings puts around a text what the tokenizer's files say (the end token of "
        "Qwen3-Embedding), and no"
    )
    yield (
        "more: the instruction that a model wants before a query, as in its "
        "config_sentence_transformers.json, is the"
    )
    yield (
        "client's to write. Token ids are taken as they are, and have to be the model's own: "
        "LangChain's"
    )
    yield "OpenAIEmbeddings sends those of OpenAI's vocabulary, unless it is made with"
    yield (
        "`check_embedding_ctx_length=False`. `dimensions` may be what the model has, and "
        "nothing else.\n"
    )
    yield "A field that was taken and changed nothing is named in the answer's header"
    yield "`jaxserve-ignored`; so are `stream_options` without `stream`, `top_logprobs` without"
    yield "`logprobs`, `cache_control` on a part of a text or on a tool, and keys of messages that"
    yield "change nothing in what the chat template makes of them (`name` and `annotations`, and"
    yield "those that every template reads, are not named). Whole numbers may be written 1.0."
    yield "`max_tokens` beyond what context and page pool leave stands for what they leave, and the"
    yield "answer ends with length; `--strict-max-tokens` refuses it.\n"
    yield "A stream begins when its request has a row, or after 10 s of waiting; until then an"
    yield "error has a status of its own. While nothing is told, a comment comes every 15 s.\n"
    yield "Accepted, and without effect here:\n"
    yield from (f"- `{field}`: {why}" for field, why in IGNORED.items())
    yield (
        "\nAccepted, of completions, only where they ask for what happens anyway, unless they "
        "are fields above:\n"
    )
    for field, values in ONLY.items():
        yield f"- `{field}`: " + " or ".join(f"`{json.dumps(value)}`" for value in (*values, None))
    yield ""


AGENTS = """## OpenAI's responses and Anthropic's messages over HTTP

Every field of openai-python 3.57 and of anthropic 2.14, the beta ones included, is in one of three
lists. A field in none of them is named in `jaxserve-ignored` like those without effect, and refused
with `--unknown-fields error`; one of sampling, or of another of these APIs, is refused with its
name in this one. Commands and rules: [clients.md](clients.md#agents).
"""
ELSEWHERE = """
In both, images and files are refused by their paths: models read text here. Tools of other types
than functions and custom tools, which the vendor's own servers run, are left out and named, such as
`tools.web_search`; a choice that forces one is refused.
"""


def agents() -> Iterator[str]:
    """List the fields of /v1/responses and /v1/messages, and what is refused."""
    yield AGENTS
    for path, kinds in DOORS.items():
        yield f"### {path}\n"
        yield "| | honoured | without effect, named as | refused |\n|---|---|---|---|"
        yield from map(_listed, kinds)
        yield ""
    items = _names(sorted(OTHER_ITEMS))
    yield f"Items that are refused by `input[i].type`: {items}.\n"
    blocks = _names(sorted(REFUSED_BLOCKS))
    yield f"Blocks that are refused by `messages[i].content[j].type`: {blocks}."
    yield ELSEWHERE
    yield "Fields without effect, and why:\n"
    yield from _reasons("ignored")
    yield "\nFields that are refused, and why:\n"
    yield from _reasons("refused")
    yield ""


def _names(names: Iterable[str], place: str = "") -> str:
    return ", ".join(f"`{place}{name}`" for name in names)


def _listed(kind: type[Listed]) -> str:
    """Return the row of one kind of object."""
    refused = ", ".join(_refused(kind, name) for name in kind.refused)
    honoured = _names(kind.model_fields)
    return f"| {kind.what} | {honoured} | {_names(kind.ignored, kind.place)} | {refused} |"


def _refused(kind: type[Listed], name: str) -> str:
    """Return the name of a refused field, with the values that ask for nothing."""
    values = " or ".join(f"`{json.dumps(value)}`" for value in kind.only.get(name, ()))
    return f"`{name}` (not {values})" if values else f"`{name}`"


def _reasons(which: str) -> Iterator[str]:
    """Yield a line for each reason in the lists of this name."""
    found: dict[str, dict[str, None]] = {}
    for kind in (kind for kinds in DOORS.values() for kind in kinds):
        for name, reason in getattr(kind, which).items():
            found.setdefault(reason, {})[f"{kind.place}{name}"] = None
    yield from (f"- {_names(names)}: {reason}" for reason, names in found.items())


def messages() -> Iterator[str]:
    yield "## Messages\n"
    for file in descriptors().values():
        for i, message in enumerate(file.message_type):
            yield f"### {message.name}\n\n{comment(file, MESSAGE, i)}\n"
            if message.field:
                yield "| field | type | |\n|---|---|---|"
                yield from (_row(file, i, j, message) for j in range(len(message.field)))
                yield ""
        for i, enum in enumerate(file.enum_type):
            yield f"### {enum.name}\n\n{comment(file, ENUM, i)}\n"
            yield "| value | |\n|---|---|"
            yield from (
                f"| {v.name} | {comment(file, ENUM, i, 2, j)} |" for j, v in enumerate(enum.value)
            )
            yield ""


def _row(file: FileDescriptorProto, i: int, j: int, message: DescriptorProto) -> str:
    field = message.field[j]
    return f"| {field.name} | {_type(field, message)} | {comment(file, MESSAGE, i, FIELD, j)} |"


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    name = field.type_name.rsplit(".", 1)[-1] if field.type_name else TYPES[field.type]
    for nested in message.nested_type:
        if nested.name == name and nested.options.map_entry:
            key, value = (_type(inner, nested) for inner in nested.field)
            return f"map of {key} to {value}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name} (one of {message.oneof_decl[field.oneof_index].name})"
    return name


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(document(), encoding="utf-8")
