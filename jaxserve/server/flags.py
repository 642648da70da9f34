"""The flags of serve."""

import argparse
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jaxserve.chat.answers import REASONING_PARSERS, TOOL_PARSERS
from jaxserve.cli.flags import engine_flags, hosts_flags, model_flag
from jaxserve.cli.parser import Parser
from jaxserve.errors import ConfigError
from jaxserve.plan.bundle import Manifest
from jaxserve.server.core.limits import Limits
from jaxserve.server.disaggregation.flags import role_flags
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.files import read_token


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m jaxserve.serve",
        description="Serve a checkpoint over gRPC, and over HTTP as OpenAI's API.",
    )
    model_flag(p)
    p.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: its folder)",
    )
    p.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja template, instead of the model's",
    )
    _parser_flags(p.add_argument_group("answers"))
    _address_flags(p.add_argument_group("addresses"))
    _security_flags(p.add_argument_group("credentials"))
    _operation_flags(p.add_argument_group("operation"))
    p.add_argument(
        "--bundle",
        type=Path,
        metavar="DIR",
        help="steps compiled ahead by python -m jaxserve.plan --out, which then decides mesh, "
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
        help="how the model writes calls of functions (default: by the marks in its chat "
        "template; none: no tools)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="think: <think>...</think> stands apart from what is said (default: if the chat "
        "template has these marks)",
    )


def _address_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="default: this machine only, 127.0.0.1")
    group.add_argument(
        "--port", type=_port, default=50051, metavar="N", help="of gRPC; 0: any (default 50051)"
    )
    group.add_argument(
        "--http-port", type=_port, default=8000, metavar="N", help="of HTTP; 0: any (default 8000)"
    )
    group.add_argument("--no-http", action="store_true", help="gRPC only")
    group.add_argument(
        "--vllm-port", type=_port, metavar="N", help="of vLLM's gRPC, for routers such as smg"
    )
    group.add_argument(
        "--admin-port", type=_port, metavar="N", help="AdminService on a port of its own"
    )


def _security_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token-file", type=Path, metavar="F", help="clients have to send the token in this file"
    )
    group.add_argument(
        "--admin-token-file", type=Path, metavar="F", help="the same for AdminService"
    )
    group.add_argument(
        "--tls-cert", type=Path, metavar="F", help="PEM: the server's certificate chain"
    )
    group.add_argument("--tls-key", type=Path, metavar="F", help="PEM: its key")
    group.add_argument(
        "--tls-client-ca", type=Path, metavar="F", help="PEM: clients need a certificate of this CA"
    )


def _operation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="for running requests after SIGTERM (30)",
    )
    group.add_argument(
        "--step-timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="of one step, then the server gives up (60)",
    )
    group.add_argument(
        "--profile-dir", type=Path, metavar="DIR", help="where StartProfile may write"
    )
    group.add_argument(
        "--otel",
        action="store_true",
        help="a trace of every request, sent as the OTEL_* variables say",
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text")
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def _limit_flags(group: argparse._ArgumentGroup) -> None:
    for flag, default, what in Limits.table():
        kind = _count if isinstance(default, int) else _seconds
        group.add_argument(
            flag, type=kind, default=default, metavar="N", help=f"{what} ({default:g})"
        )


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


def check_bundle(args: argparse.Namespace, manifest: Manifest) -> None:
    """ConfigError for a flag that asks for something else than what the bundle was compiled for."""
    check_role(args, manifest)
    decided = asdict(manifest.options()) | dict(manifest.mesh) | {"prefer": "nothing of it"}
    decided |= {"dtype": manifest.dtype, "weights": manifest.weights}
    unsaid = dict.fromkeys(("dtype", "weights", "kv"), "auto") | dict.fromkeys(manifest.mesh, 1)
    for name, value in ({"compilation_cache": "its own cache"} | decided).items():
        asked = getattr(args, name, None)
        if asked is not None and asked != unsaid.get(name) and asked != value:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} {asked}: the bundle was compiled for {value} (leave it out)"
            )


def check_role(args: argparse.Namespace, manifest: Manifest) -> None:
    """ConfigError where pages are exchanged with others, and the bundle has no programs for that,
    or the reverse.
    """
    exchanges = manifest.options().page_exchange
    if exchanges != (args.role != "both"):
        others = (
            "prefill or decode"
            if exchanges
            else "both (python -m jaxserve.plan --link compiles for the others)"
        )
        raise ConfigError(f"--role {args.role}: the bundle was compiled for --role {others}")


def limits(args: argparse.Namespace) -> Limits:
    return Limits(**{field.name: getattr(args, field.name) for field in fields(Limits)})


def tokens(args: argparse.Namespace) -> BearerTokens:
    """ConfigError when a file cannot be read, or holds no token."""
    client, admin = (
        read_token(args.token_file, "--token-file"),
        read_token(args.admin_token_file, "--admin-token-file"),
    )
    return BearerTokens(client, admin)
