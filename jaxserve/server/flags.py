"""Flags of jaxserve serve."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxserve.addresses import check_listening_host, without_brackets
from jaxserve.cache_folders import folder_problem
from jaxserve.chat.answers import REASONING_PARSERS, TOOL_PARSERS
from jaxserve.cli.checks import check_file
from jaxserve.cli.flags import engine_flags, hosts_flags, model_argument, model_flag
from jaxserve.cli.parser import Parser
from jaxserve.config.option import flag_of
from jaxserve.errors import ConfigError, flag_text
from jaxserve.server.core.limits import Limits
from jaxserve.server.disaggregation.flags import role_flags
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.files import read_token


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    p = Parser(
        prog="jaxserve serve",
        description="Serve a checkpoint over gRPC, and over HTTP as OpenAI's API.",
    )
    model_argument(p)
    model_flag(p)
    p.add_argument(
        "--served-model-name",
        type=_name,
        metavar="NAME",
        help="name by which clients ask for the model (default: org/name of the hub, or the name "
        "of its folder)",
    )
    p.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template to use instead of the model's chat template",
    )
    p.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling parameters that a request leaves open: auto takes those of the model's "
        "generation_config.json, none takes none of it (default: auto)",
    )
    _parser_flags(p.add_argument_group("answers"))
    _address_flags(p.add_argument_group("addresses"))
    _security_flags(p.add_argument_group("credentials"))
    _operation_flags(p.add_argument_group("operation"))
    p.add_argument(
        "--bundle",
        type=Path,
        metavar="DIR",
        help="folder of steps compiled ahead by jaxserve plan --out, which decides mesh, "
        "dtype and sizes",
    )
    role_flags(p.add_argument_group("prefill and decode apart (docs/disaggregation.md)"))
    _limit_flags(p.add_argument_group("limits"))
    engine_flags(p.add_argument_group("engine"))
    hosts_flags(p.add_argument_group("several hosts: the same command on each, with its number"))
    return p


def _parser_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="format in which the model writes calls of functions; none turns tools off (default: "
        "auto, by the marks in the chat template)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="format in which the model writes its reasoning; think tells <think>...</think> from "
        "the answer (default: auto, think if the chat template has these marks)",
    )


def _address_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        type=without_brackets,
        default="127.0.0.1",
        help="address to listen on, or a name: then on all of its addresses (default: 127.0.0.1, "
        "for this machine only)",
    )
    group.add_argument(
        "--port",
        type=_port,
        default=50051,
        metavar="N",
        help="port of gRPC; 0 takes any free one (default: 50051)",
    )
    group.add_argument(
        "--http-port",
        type=_port,
        default=8000,
        metavar="N",
        help="port of HTTP; 0 takes any free one (default: 8000)",
    )
    group.add_argument("--no-http", action="store_true", help="serve gRPC only")
    group.add_argument(
        "--vllm-port",
        type=_port,
        metavar="N",
        help="port of vLLM's gRPC service, for routers such as smg (default: not served)",
    )
    group.add_argument(
        "--admin-port",
        type=_port,
        metavar="N",
        help="port for AdminService alone (default: --port serves it too)",
    )


def _security_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="F",
        help="file with the token that clients have to send (default: none is asked for)",
    )
    group.add_argument(
        "--admin-token-file",
        type=Path,
        metavar="F",
        help="file with the token that callers of AdminService have to send",
    )
    group.add_argument(
        "--tls-cert",
        type=Path,
        metavar="F",
        help="PEM file of the server's certificate chain; turns TLS on, with --tls-key",
    )
    group.add_argument(
        "--tls-key", type=Path, metavar="F", help="PEM file of the server's private key"
    )
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="F",
        help="PEM file of the authority from which clients need a certificate",
    )


def _operation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that running requests get to end after SIGTERM (default: 30)",
    )
    group.add_argument(
        "--step-timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds after which a step counts as hung and the server gives up (default: 60)",
    )
    group.add_argument(
        "--profile-dir",
        type=Path,
        metavar="DIR",
        help="folder in which StartProfile may write (default: profiling is off)",
    )
    group.add_argument(
        "--otel",
        action="store_true",
        help="send a trace of every request to where the OTEL_* variables point",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="form of the lines on standard error (default: text)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severity that is logged; debug has a line for every request (default: info)",
    )
    group.add_argument(
        "--log-requests",
        action="store_true",
        help="log a line for every request at info as well",
    )


def _limit_flags(group: argparse._ArgumentGroup) -> None:
    for flag, default, what in Limits.table():
        kind = _count if isinstance(default, int) else _seconds
        group.add_argument(
            flag,
            type=kind,
            default=default,
            metavar="N",
            help=f"most {what} (default: {_shown(flag, default)})",
        )


def _shown(flag: str, default: float) -> str:
    """Return a limit's default with its unit, such as "8 MiB"; the flag's name tells the unit."""
    if flag.endswith("-seconds"):
        return f"{default:g} s"
    if flag.endswith("-bytes"):
        unit, size = ("MiB", 2**20) if default >= 2**20 else ("KiB", 2**10)
        return f"{default / size:g} {unit}"
    return str(default)


def _name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that clients can ask for")
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    return int(_positive(text, int))


def _seconds(text: str) -> float:
    return _positive(text, float)


def _positive(text: str, kind: Any) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < 2**62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def limits(args: argparse.Namespace) -> Limits:
    """Return the bounds that the flags ask for."""
    return Limits(**{field.name: getattr(args, field.name) for field in fields(Limits)})


# Flags whose files the server reads at its start.
FILES = (
    *("chat_template", "token_file", "admin_token_file", "tls_cert", "tls_key", "tls_client_ca"),
    *("prefill_servers_file", "prefill_token_file", "prefill_tls_ca"),
)


def check_places(args: argparse.Namespace) -> None:
    """Raise ConfigError for a file, folder or host that is not there; no file is opened.

    A pipe can be read only once. What the files hold is checked where they are read, before the
    model is loaded.
    """
    for name in FILES:
        check_file(flag_of(name), getattr(args, name))
    problem = folder_problem(args.profile_dir) if args.profile_dir else None
    if problem:
        raise ConfigError(
            flag_text("--profile-dir", args.profile_dir, f"no profile can be written: {problem}")
        )
    check_listening_host("--host", args.host)


def tokens(args: argparse.Namespace) -> BearerTokens:
    """Return the tokens that clients send; ConfigError for a file without one."""
    return BearerTokens(
        read_token(args.token_file, "--token-file"),
        read_token(args.admin_token_file, "--admin-token-file"),
    )
