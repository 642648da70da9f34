"""jaxserve on a Ray cluster: rows and requests of Ray Data, Ray Serve, engines over several hosts.

Needs the extra `ray`. docs/cluster.md says what to use when. Nothing else in jaxserve imports it.
"""

from importlib.metadata import PackageNotFoundError, version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from jaxserve.ray.batches import answer_requests, read_requests, write_answers
    from jaxserve.ray.host_group import HostGroup
    from jaxserve.ray.placement import Place
    from jaxserve.ray.rows import generate_rows
    from jaxserve.ray.serving import build, openai_app

__all__ = [
    "HostGroup",
    "Place",
    "answer_requests",
    "build",
    "generate_rows",
    "openai_app",
    "read_requests",
    "write_answers",
]

_HOMES = {
    "HostGroup": "host_group",
    "Place": "placement",
    "answer_requests": "batches",
    "build": "serving",
    "generate_rows": "rows",
    "openai_app": "serving",
    "read_requests": "batches",
    "write_answers": "batches",
}
_OLDEST = (2, 60)  # release of Ray; older ones were not tested
_TOO_NEW = (2, 64)  # ends the option of Ray Data that bounds restarts


def _check_ray() -> None:
    """Raise ImportError unless a release of Ray is installed that was tested."""
    remedy = "pip install 'jaxserve[ray]'"
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise ImportError(f"jaxserve.ray needs Ray, which is not installed ({remedy})") from None
    if not _OLDEST <= tuple(map(int, installed.split(".")[:2])) < _TOO_NEW:
        oldest, too_new = (".".join(map(str, each)) for each in (_OLDEST, _TOO_NEW))
        raise ImportError(
            f"Ray {installed} is installed; jaxserve.ray needs {oldest} or newer, below {too_new} "
            f"({remedy})"
        )


_check_ray()


def __getattr__(name: str) -> "Any":
    """Import a public name on first use: an engine over hosts needs nothing of Ray Serve."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"jaxserve.ray.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxserve.ray' has no attribute {name!r}")
