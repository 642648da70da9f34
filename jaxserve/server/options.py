"""Options of `jaxserve serve`, by their subjects; no jax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from jaxserve.addresses import host_names, page_origins, without_brackets
from jaxserve.chat import UnknownFields
from jaxserve.chat.answers import REASONING_PARSERS, TOOL_PARSERS
from jaxserve.config.flag_values import number_above_0, port_number
from jaxserve.config.option import option
from jaxserve.flag_errors import flag_error


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Formats in which the model writes more than text."""

    tool_parser: str = option(
        "auto",
        "format in which the model writes calls of functions; none turns tools off (default: auto, "
        "by the marks in the chat template)",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "format in which the model writes its reasoning; think tells <think>...</think> from the "
        "answer (default: auto, think if the chat template has these marks)",
        choices=REASONING_PARSERS,
    )
    unknown_fields: UnknownFields = option(
        "ignore",
        "options of a conversation that its chat template does not heed: ignore names them in the "
        "answer, as jaxserve-ignored; error refuses the request (default: ignore)",
        choices=get_args(UnknownFields),
    )


@dataclass(frozen=True, kw_only=True)
class AddressOptions:
    """Addresses that the server listens on."""

    host: str = option(
        "127.0.0.1",
        "address to listen on, or a name: then on all of its addresses (default: 127.0.0.1, for "
        "this machine only)",
        parse=without_brackets,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names, separated by commas, by which HTTP clients may call a server without --token-file, "
        "beside IP addresses, localhost and --host; * allows any (default: none)",
        metavar="NAMES",
        parse=host_names,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins of web pages, separated by commas, that may use HTTP from a browser, such as "
        "https://chat.example; * allows any (default: none)",
        metavar="ORIGINS",
        parse=page_origins,
    )
    port: int = option(
        50051, "port of gRPC; 0 takes any free one (default: 50051)", metavar="N", parse=port_number
    )
    http_port: int = option(
        8000, "port of HTTP; 0 takes any free one (default: 8000)", metavar="N", parse=port_number
    )
    http: bool = option(True, "serve gRPC only")
    vllm_port: int | None = option(
        None,
        "port of vLLM's gRPC service, for routers such as smg (default: not served)",
        metavar="N",
        parse=port_number,
    )
    admin_port: int | None = option(
        None,
        "port for AdminService alone (default: --port serves it too)",
        metavar="N",
        parse=port_number,
    )


@dataclass(frozen=True, kw_only=True)
class CredentialOptions:
    """Files of the tokens and certificates of the server and its clients."""

    token_file: Path | None = option(
        None,
        "file with the token that clients have to send, or with one token in each line, whose "
        "clients then share the rows evenly (default: none is asked for)",
        metavar="F",
    )
    admin_token_file: Path | None = option(
        None, "file with the token that callers of AdminService have to send", metavar="F"
    )
    state_key_file: Path | None = option(
        None,
        "file with 32 random bytes or more, by which servers open the thoughts that each of them "
        "sealed for clients of /v1/responses and /v1/messages (default: a key that ends with the "
        "process)",
        metavar="F",
    )
    tls_cert: Path | None = option(
        None,
        "PEM file of the server's certificate chain; turns TLS on, with --tls-key",
        metavar="F",
    )
    tls_key: Path | None = option(None, "PEM file of the server's private key", metavar="F")
    tls_client_ca: Path | None = option(
        None, "PEM file of the authority from which clients need a certificate", metavar="F"
    )


@dataclass(frozen=True, kw_only=True)
class OperationOptions:
    """Time-outs, and what operators see."""

    drain_timeout: float = option(
        30.0,
        "seconds that running requests get to end after SIGTERM (default: 30)",
        metavar="S",
        parse=number_above_0,
    )
    step_timeout: float = option(
        60.0,
        "seconds after which a step counts as hung and the server gives up (default: 60)",
        metavar="S",
        parse=number_above_0,
    )
    ready_when: Literal["first", "all"] | None = option(
        None,
        "steps that are compiled before requests are taken: first, the largest of each kind, "
        "which run every request until the others come; all, every step (default: first; all with "
        "--hosts, --pod or --deterministic, and on a GPU where the model was never compiled)",
        choices=("first", "all"),
    )
    profile_dir: Path | None = option(
        None, "folder in which StartProfile may write (default: profiling is off)", metavar="DIR"
    )
    otel: bool = option(False, "send a trace of every request to where the OTEL_* variables point")
    log_format: Literal["text", "json"] = option(
        "text", "form of the lines on standard error (default: text)", choices=("text", "json")
    )
    log_level: str = option(
        "info",
        "least severity that is logged; debug has a line for every request (default: info)",
        choices=("debug", "info", "warning", "error"),
    )
    log_requests: bool = option(False, "log a line for every request at info as well")


def check_ready_when(ready_when: str | None, deterministic: bool) -> None:
    """Raise ConfigError for a value of --ready-when that a deterministic engine does not take."""
    if ready_when == "first" and deterministic:
        problem = "with --deterministic no text may change while steps come (choose all)"
        raise flag_error("--ready-when", "first", problem)
