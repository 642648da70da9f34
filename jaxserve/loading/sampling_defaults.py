"""Defaults of sampling parameters, which a publisher writes into generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from jaxserve.errors import ModelError, RequestError
from jaxserve.sampling_params import SamplingFields, SamplingParams

FILE: Final = "generation_config.json"
FOLLOWED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Fields that other modules read, or that decide nothing about tokens.
WITHOUT_EFFECT: Final = frozenset(
    """
    eos_token_id bos_token_id pad_token_id decoder_start_token_id transformers_version
    _from_model_config _commit_hash max_length use_cache cache_implementation cache_config
    return_dict_in_generate return_legacy_cache output_attentions output_hidden_states
    output_scores output_logits num_return_sequences early_stopping low_memory disable_compile
    compile_config trust_remote_code chat_format
    """.split()
)
# Values of other fields that change nothing.
NEUTRAL: Final[Mapping[str, object]] = {
    "do_sample": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "length_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of sampling parameters that a request leaves open."""

    fields: SamplingFields
    not_followed: tuple[str, ...] = ()  # other fields, which would change tokens or may do so

    @property
    def lines(self) -> list[str]:
        """Lines of the start on what is followed and what is not."""
        lines = list[str]()
        if self.fields:
            values = ", ".join(f"{name} {value}" for name, value in self.fields.items())
            lines.append(f"sampling {values} where a request says nothing ({FILE})")
        if self.not_followed:
            names = ", ".join(self.not_followed)
            lines.append(f"sampling not followed, of {FILE}: {names}")
        return lines


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults that a generation_config.json gives; ModelError if out of bounds.

    As in other servers, do_sample does not count, by which transformers switches between sampling
    and greedy decoding; nor does max_new_tokens, the length of an answer.
    """
    given = {name: value for name, value in generation_config.items() if value is not None}
    found = {name: given[name] for name in FOLLOWED if name in given}
    if found.get("top_k") == -1:  # what vLLM calls all
        found["top_k"] = 0
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{FILE}: {error} (--generation-config none leaves it out)") from None
    known = {*FOLLOWED, *WITHOUT_EFFECT}
    others = (name for name, value in given.items() if name not in known and _acts(name, value))
    return SamplingDefaults(cast(SamplingFields, found), tuple(sorted(others)))


def _acts(name: str, value: object) -> bool:
    """Return whether a field that is not followed asks for anything."""
    if name in NEUTRAL:
        return value != NEUTRAL[name]
    return value not in (False, 0, [], {}, "")
