"""Bounds of sampling parameters: at, and just beyond."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import RequestError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature is -0.1; it must be between 0.0 and 2.0"),
    ({"temperature": 2.1}, "temperature is 2.1"),
    ({"temperature": math.nan}, "temperature is nan; it must be a finite number"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": True}, "temperature is True"),
    ({"top_p": 0.0}, "top_p is 0, which keeps no token"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616"),
    ({"n": 0}, "n is 0; it must be between 1 and 16"),
    ({"n": 17}, "n is 17"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    *(({name: None}, f"{name} is None; it must be an integer") for name in ("top_k", "n")),
    ({"min_tokens": None}, "min_tokens is None; it must be an integer"),
    ({"stop": ""}, "stop has '' as entry 0; it must be a string of 1 to 256 bytes"),
    ({"stop": b"text"}, "stop is b'text'; give a list of strings"),
    ({"stop": [""]}, "stop has '' as entry 0; it must be a string of 1 to 256 bytes"),
    ({"stop": ["x" * 257]}, "stop has 'xxx.* as entry 0; it must be a string of 1 to 256 bytes"),
    ({"stop": ["x"] * 17}, "stop has 17 strings; the limit is 16"),
    ({"stop_token_ids": range(33)}, "stop_token_ids has 33 ids; the limit is 32"),
    (
        {"logit_bias": {i: 1.0 for i in range(1025)}},
        "logit_bias has 1025 entries; the limit is 1024",
    ),
    ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\] is 101.0"),
    ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\] is inf"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": 7}, "allowed_token_ids is 7; give a list of token ids"),
    (
        {"allowed_token_ids": [1, 2.0]},
        "allowed_token_ids has 2.0 as entry 1; it must be an integer",
    ),
    ({"stop_token_ids": b"ab"}, "stop_token_ids is b'ab'; give a list of token ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids has True as entry 0; it must be an integer"),
    ({"stop": 5}, "stop is 5; give a list of strings"),
    ({"stop": [5]}, "stop has 5 as entry 0; it must be a string of 1 to 256 bytes"),
    ({"stop": ["a", "\ud800"]}, r"stop has '\\ud800' as entry 1, which is not valid Unicode"),
    ({"logit_bias": [1, 2]}, r"logit_bias is \[1, 2\]; give a mapping of token ids to numbers"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias has '3' as entry 0; it must be an integer"),
    ({"logit_bias": {3: "much"}}, r"logit_bias\[3\] is 'much'; it must be a finite number"),
    ({"temperature": 10**400}, "temperature is 1"),
    ({"include_stop": 1}, "include_stop is 1; it must be true or false"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**fields)
    assert caught.value.field == re.split("[: ]", message)[0].replace("\\", "")
    assert "\n" not in str(caught.value)


def test_the_text_of_an_error_is_a_clause() -> None:
    assert str(RequestError("seed", "is -1; it must be an integer")).startswith("seed is -1; ")
    assert str(RequestError("prompt", "is empty")) == "prompt is empty"
    inner = RequestError("seed", "is -1").under("sampling")
    assert (inner.field, inner.problem, str(inner)) == (
        "sampling.seed",
        "is -1",
        "sampling.seed is -1",
    )


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([4, 5]),
        allowed_token_ids=np.array([1], np.uint16),
        logit_bias={np.int32(7): np.float16(0.25)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=2**64 - 1,
        stop_token_ids=(4, 5),
        allowed_token_ids=(1,),
        logit_bias={7: 0.25},
    )
    plain = (
        params.temperature,
        params.top_k,
        params.seed,
        *params.stop_token_ids,
        *params.logit_bias,
    )
    assert {type(value) for value in plain} == {float, int}


def test_nothing_left_to_choose() -> None:
    params = SamplingParams(allowed_token_ids=[2, 7], stop_token_ids=[7], min_tokens=1)
    with pytest.raises(
        RequestError, match="allowed_token_ids has only end tokens, and min_tokens keeps those out"
    ):
        Request(id="a", prompt=(1,), params=params, eos_ids=(2,)).check(vocab_size=10)
    Request(id="a", prompt=(1,), params=replace(params, ignore_eos=True), eos_ids=(2,)).check(
        vocab_size=10
    )


def test_every_bound_itself_is_allowed() -> None:
    SamplingParams(
        temperature=2.0,
        top_k=2**31 - 1,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=100.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={i: -100.0 for i in range(1024)},
        seed=2**64 - 1,
        stop=["x" * 256] * 16,
        stop_token_ids=range(32),
        min_tokens=7,
        max_tokens=7,
        n=16,
        logprobs=20,
        prompt_logprobs=20,
    )


def test_a_single_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="end") == SamplingParams(stop=["end"])
