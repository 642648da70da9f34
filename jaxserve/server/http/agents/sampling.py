"""Sampling parameters of agents' requests."""

from collections.abc import Mapping
from typing import Any, Protocol

from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.server.http.agents.turns import names_of_body
from jaxserve.server.http.types import SAME


class Sampled(Protocol):
    """A body with the fields of SAME, and with this one."""

    @property
    def top_k(self) -> int | None: ...


def sampling_of(
    body: Sampled, defaults: SamplingFields, names: Mapping[str, str], **given: Any
) -> SamplingParams:
    """Return the sampling parameters of a body; RequestError has the path of what is wrong.

    Args:
        defaults: Values of parameters that the body leaves open.
        names: Paths in the body of parameters that have another name there.
        given: Parameters by name, instead of the body's; None for those that are left open.
    """
    found = {name: getattr(body, name) for name in SAME}
    found["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM turns top_k off by -1
    found |= given
    chosen = {name: value for name, value in found.items() if value is not None}
    with names_of_body(names, ()):
        return SamplingParams(**{**defaults, **chosen})
