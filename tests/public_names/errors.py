"""The errors of jaxserve.errors by name, and every error that a server tells by its reason."""

import inspect
from importlib import import_module

from jaxserve import errors as root
from jaxserve.errors import JaxserveError, RequestError
from jaxserve.server.http.errors import error_body
from tests.public_names import exports

# Where errors are defined that users can see.
HOMES = (
    *("jaxserve.errors", "jaxserve.client.errors"),
    *("jaxserve.server.http.errors", "jaxserve.server.grpc.errors"),
)


def errors() -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in _defined_in("jaxserve.errors"):
        path = f"{root.__name__}.{kind.__name__}"
        retry = "" if kind.retry_after is None else f", retry after {kind.retry_after:g} s"
        inherited = exports.of_class(path, kind.__mro__[1])
        found |= dict(exports.of_class(path, kind).items() - inherited.items())
        found[path] += f"; {kind.code}, HTTP {kind.http_status}, {kind.reason}{retry}"
    return found | _reasons()


def _reasons() -> dict[str, str]:
    """Code of gRPC, status of HTTP, and the words of the JSON body, by the reason."""
    kinds = [kind for home in HOMES for kind in _defined_in(home)]
    return {f"reason {kind.reason}": _on_the_wire(kind) for kind in reversed(kinds)}


def _defined_in(home: str) -> list[type[JaxserveError]]:
    members = [member for _, member in inspect.getmembers(import_module(home), inspect.isclass)]
    return [m for m in members if issubclass(m, JaxserveError) and m.__module__ == home]


def _on_the_wire(kind: type[JaxserveError]) -> str:
    error = kind.__new__(kind, "")
    if isinstance(error, RequestError):
        error.field = ""
    told = error_body(error)["error"]
    return f"{kind.code}, HTTP {kind.http_status}, code {told['code']}, type {told['type']}"
