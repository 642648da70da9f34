"""Fields of requests to vllm.grpc.engine.VllmEngine: honoured, refused or bounded."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from tests.jaxserve.server.grpc.test_inference import TEXT, expected
from tests.jaxserve.server.grpc.vllm_harness import answered, refused, request, serving


def honoured() -> dict[str, Any]:
    """Make a request in which every honoured field is set."""
    return {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "frequency_penalty": 0.5},
        **{
            "presence_penalty": 0.5,
            "repetition_penalty": 1.5,
            "max_tokens": 2,
            "min_tokens": 1,
            "stop": ["x"],
        },
        **{
            "stop_token_ids": [5],
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
        },
        **{
            "ignore_eos": True,
            "n": 2,
            "logprobs": 1,
            "prompt_logprobs": 1,
            "seed": 7,
            "logit_bias": {5: 1.0},
        },
        "include_stop_str_in_output": True,
    }


STRUCTURES: dict[str, tuple[Any, str]] = {  # and what the text matches
    "json_schema": ('{"const": 12}', "12"),
    "json_object": (True, r"\{.*"),
    "regex": ("[0-1]{3}", "[01]{3}"),
    "choice": (pb.ChoiceConstraint(choices=["no"]), "no"),
    "grammar": ('start: "x" "y"', "xy"),
}
OTHERS: dict[str, Any] = {
    **{
        "structural_tag": "a",
        "json_object": False,
        "truncate_prompt_tokens": 3,
        "grammar_from_first_token": True,
    },
}
BESIDE: dict[str, Any] = {
    "kv_transfer_params": pb.KvTransferParams(),
    "mm_inputs": pb.MultimodalInputs(),
    "extra_mm_inputs": [pb.MultimodalInputs()],
    "kv_transfer_params_json": "",
    "data_parallel_rank": 0,
    "media_refs": pb.MediaRefs(),
}


@pytest.mark.system
def test_every_field_is_honoured_or_refused(tmp_path: Path) -> None:
    inside = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert inside == honoured().keys() | STRUCTURES.keys() | OTHERS.keys(), (
        "a field that nobody thought of"
    )
    outside = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert (
        outside == {"request_id", "tokenized", "text", "sampling_params", "stream"} | BESIDE.keys()
    )

    async def main() -> None:
        async with serving(tmp_path) as (server, engine):
            _, completes = await answered(engine, request(**honoured()))
            assert [complete.completion_tokens for complete in completes] == [2, 2]
            for name, (value, text) in STRUCTURES.items():
                _, (complete,) = await answered(engine, request(**{name: value, "max_tokens": 3}))
                assert re.fullmatch(text, bytes(complete.output_ids).decode())
            for name, value in OTHERS.items():
                field, text = await refused(
                    engine.Generate(request(**{name: value})), "INVALID_ARGUMENT"
                )
                assert field == f"sampling_params.{name}" and "leave it out" in text
            for name, value in BESIDE.items():
                asked = pb.GenerateRequest(tokenized=request().tokenized, **{name: value})
                field, text = await refused(engine.Generate(asked), "INVALID_ARGUMENT")
                assert field == name and "leave it out" in text
            unknown = pb.GenerateRequest.FromString(
                request().SerializeToString() + b"\xd2\x3e\x01x"
            )  # field 1002
            _, text = await refused(engine.Generate(unknown), "INVALID_ARGUMENT")
            assert "1002" in text
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(
    "given, field",
    [
        ({"temperature": 2.5}, "sampling_params.temperature"),
        ({"top_p": -0.5}, "sampling_params.top_p"),
        ({"n": 17}, "sampling_params.n"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"seed": -1}, "sampling_params.seed"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"min_tokens": 9}, "sampling_params.min_tokens"),
        ({"stop": ["x"] * 17}, "sampling_params.stop"),
        ({"stop_token_ids": [258]}, "sampling_params.stop_token_ids"),
        ({"logit_bias": {258: 1.0}}, "sampling_params.logit_bias"),
        ({"request_id": "r" * 129}, "request_id"),
    ],
)
def test_bounds_are_those_of_every_door(tmp_path: Path, given: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (_, engine):
            named, text = await refused(engine.Generate(request(**given)), "INVALID_ARGUMENT")
            assert named.partition("[")[0] == field and text.startswith(named)

    asyncio.run(main())


def test_zero_means_unsaid(tmp_path: Path) -> None:
    """0 in a field without presence, such as top_p and n, means the default, as in vLLM."""

    async def main() -> None:
        async with serving(tmp_path) as (_, engine):
            bare = pb.SamplingParams(temperature=0, seed=1, max_tokens=8)
            _, (complete,) = await answered(
                engine, pb.GenerateRequest(text=TEXT, sampling_params=bare)
            )
            assert list(complete.output_ids) == expected()
            field, _ = await refused(engine.Generate(pb.GenerateRequest()), "INVALID_ARGUMENT")
            assert field == "input"

    asyncio.run(main())
