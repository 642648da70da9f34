"""Sampling parameters of the flags that generate and the client have in common."""

from collections.abc import Mapping
from typing import Any, cast

from jaxserve.config.option import flag_of
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingFields
from jaxserve.structure import Structure


def sampling_fields(given: Mapping[str, Any], as_json: bool) -> SamplingFields:
    """Return the fields of SamplingParams whose flags are given.

    RequestError for flags that contradict others.

    Args:
        given: Values of the flags that were given, by field (see `given_options`).
        as_json: Whether the output is JSON.
    """
    found = dict(given)
    for name in ("logprobs", "prompt_logprobs"):
        if name in found and not as_json:
            raise RequestError(flag_of(name), "is shown in JSON only (add --json)")
    for kind, value in found.pop("structure", {}).items():
        found["structure"] = Structure.of(kind, value, flag_of(kind))
    return cast(SamplingFields, found)
