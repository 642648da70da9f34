"""Flags of `jaxserve serve`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.addresses import check_listening_host
from jaxserve.cache_folders import folder_problem
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.cli.checks import check_file
from jaxserve.cli.field_flags import add_flags, options_from
from jaxserve.cli.flags import EngineFlags, model_argument, model_option
from jaxserve.cli.parser import Parser
from jaxserve.cluster.hosts import HostOptions
from jaxserve.config.option import option, options
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.server.core.client_rules import ClientRules
from jaxserve.server.core.limits import Limits
from jaxserve.server.disaggregation.flags import TWO_MESHES, Meshes, RoleOptions, meshes
from jaxserve.server.options import (
    AddressOptions,
    AnswerOptions,
    CredentialOptions,
    OperationOptions,
)
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.files import read_token, read_tokens


def _name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that clients can ask for")
    return text


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `jaxserve serve`."""

    model: Path | HubModel = model_option()
    served_model_name: str | None = option(
        None,
        "name by which clients ask for the model (default: org/name of the hub, or the name of its "
        "folder)",
        metavar="NAME",
        parse=_name,
    )
    chat_template: Path | None = option(
        None, "Jinja template to use instead of the model's chat template", metavar="FILE"
    )
    generation_config: str = option(
        "auto",
        "sampling parameters that a request leaves open: auto takes those of the model's "
        "generation_config.json, none takes none of it (default: auto)",
        choices=("auto", "none"),
    )
    rules: ClientRules = options(ClientRules)
    answers: AnswerOptions = options(AnswerOptions, "answers")
    addresses: AddressOptions = options(AddressOptions, "addresses")
    credentials: CredentialOptions = options(CredentialOptions, "credentials")
    operation: OperationOptions = options(OperationOptions, "operation")
    bundle: Path | None = option(
        None,
        "folder of steps compiled ahead by jaxserve plan --out, which decides mesh, dtype and "
        "sizes",
        metavar="DIR",
    )
    roles: RoleOptions = options(RoleOptions, "prefill and decode apart (docs/disaggregation.md)")
    limits: Limits = options(Limits, "limits")
    engine: EngineFlags = options(EngineFlags, "engine")
    hosts: HostOptions = options(
        HostOptions, "several hosts: the same command on each, with its number"
    )

    @property
    def files(self) -> dict[str, Path | None]:
        """Files that the server reads at its start, by their flags."""
        return {
            "--chat-template": self.chat_template,
            "--token-file": self.credentials.token_file,
            "--admin-token-file": self.credentials.admin_token_file,
            "--state-key-file": self.credentials.state_key_file,
            "--tls-cert": self.credentials.tls_cert,
            "--tls-key": self.credentials.tls_key,
            "--tls-client-ca": self.credentials.tls_client_ca,
            "--prefill-servers-file": self.roles.prefill_servers_file,
            "--prefill-token-file": self.roles.prefill_token_file,
            "--prefill-tls-ca": self.roles.prefill_tls_ca,
        }


def parser() -> Parser:
    """Return the parser of the program."""
    p = Parser(
        prog="jaxserve serve",
        description="Serve a checkpoint over gRPC, and over HTTP as OpenAI's API.",
    )
    model_argument(p)
    add_flags(p, ServeOptions)
    return p


def parse(arguments: Sequence[str] | None = None) -> ServeOptions:
    """Return the options of a command line, by default that of this process."""
    return options_from(ServeOptions, parser().parse_args(arguments))


def check_places(options: ServeOptions) -> None:
    """Raise ConfigError for a file, folder or host that is not there; no file is opened.

    A pipe can be read only once. What the files hold is checked where they are read, before the
    model is loaded.
    """
    for flag, path in options.files.items():
        check_file(flag, path)
    folder = options.operation.profile_dir
    problem = folder_problem(folder) if folder else None
    if problem:
        raise flag_error("--profile-dir", folder, f"no profile can be written: {problem}")
    check_listening_host("--host", options.addresses.host)


def check_limits(limits: Limits, has_http: bool) -> None:
    """Raise ConfigError for limits of which one makes another useless."""
    largest = max(limits.max_message_bytes, limits.max_body_bytes)
    if limits.max_input_bytes < largest:
        problem = f"it must be at least {largest}, for a --max-message-bytes or --max-body-bytes"
        raise flag_error("--max-input-bytes", limits.max_input_bytes, problem)
    waiting = limits.max_waiting_requests
    if has_http and limits.max_http_connections <= waiting:
        problem = f"it must be above {waiting} (--max-waiting-requests): each of those needs one"
        raise flag_error("--max-http-connections", limits.max_http_connections, problem)


def meshes_of(options: ServeOptions) -> Meshes | None:
    """Return the two meshes of one server; None where a single mesh does everything.

    Raises ConfigError for options that do not go together.
    """
    found = meshes(options.roles, options.engine.axes)
    others = {
        "--hosts": options.hosts.hosts,
        "--pod": options.hosts.pod,
        "--bundle": options.bundle,
    }
    for flag, given in others.items():
        if found and given:
            raise ConfigError(
                f"{flag} is not built in together with {TWO_MESHES} (leave one of them out)"
            )
    return found


def tokens(credentials: CredentialOptions) -> BearerTokens:
    """Return the tokens that clients send; ConfigError for a file without one."""
    return BearerTokens(
        read_tokens(credentials.token_file, "--token-file"),
        read_token(credentials.admin_token_file, "--admin-token-file"),
    )
