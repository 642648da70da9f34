"""Defaults of sampling parameters in generation_config.json, as published models have them.

Blaizzy/mlx-vlm#1331, vllm-project/vllm#11861: servers that read the file for its end tokens alone.
"""

from typing import Any

import pytest

from jaxserve.errors import ModelError
from jaxserve.loading.sampling_defaults import sampling_defaults

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
GEMMA3 = {
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "do_sample": True,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "top_k": 64,
    "top_p": 0.95,
    "transformers_version": "4.50.0.dev0",
}


@pytest.mark.parametrize(
    ("given", "fields", "not_followed"),
    [
        ({}, {}, ()),
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, ()),
        (GEMMA3, {"top_k": 64, "top_p": 0.95}, ()),
        (
            {"repetition_penalty": 1.05, "min_p": 0.1},
            {"repetition_penalty": 1.05, "min_p": 0.1},
            (),
        ),
        ({"max_new_tokens": 512, "max_length": 20}, {}, ("max_new_tokens",)),
        ({"temperature": None, "top_k": -1}, {"top_k": 0}, ()),
        ({"do_sample": False, "top_p": 0.9}, {"top_p": 0.9}, ("do_sample",)),
        (
            {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "length_penalty": 1.0},
            {},
            ("no_repeat_ngram_size", "num_beams"),
        ),
        ({"num_beams": 1, "suppress_tokens": [], "forced_eos_token_id": None}, {}, ()),
        ({"suppress_tokens": [7], "new_knob": "x"}, {}, ("new_knob", "suppress_tokens")),
    ],
)
def test_what_is_followed(
    given: dict[str, Any], fields: dict[str, Any], not_followed: tuple[str, ...]
) -> None:
    found = sampling_defaults(given)
    assert (found.fields, found.not_followed) == (fields, not_followed)
    lines = iter(found.lines)
    if fields:
        followed = next(lines)
        assert all(f" {name} {value}" in followed for name, value in fields.items())
    if not_followed:
        assert next(lines).endswith(f": {', '.join(not_followed)}")
    assert not list(lines)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 3.0},
        {"top_p": 0},
        {"top_k": 1.5},
        {"temperature": "0.6"},
        {"min_p": -1},
    ],
)
def test_what_is_out_of_bounds(given: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"^generation_config\.json: .*\(--generation-config none"):
        sampling_defaults(given)
