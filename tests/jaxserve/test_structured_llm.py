"""Structured output of a real model: what it says is what was asked for, judged by other people's
validators.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxserve.completion import Completion
from jaxserve.config import EngineOptions
from jaxserve.errors import GrammarError, RequestError
from jaxserve.generate.__main__ import main
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.structure import Structure

pytestmark = pytest.mark.system
BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat"
SMALL = BUNDLED.with_name("tiny-chat-draft")
OPTIONS = EngineOptions(
    max_batch=4, page_size=16, step_tokens=32, cache_tokens=4096, max_context=256
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["a fox", "a bear", "an owl"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "friends", "age"],
    "additionalProperties": False,
}
PROMPT = "Tell me of an animal."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SMALL, options=OPTIONS) as llm:
        yield llm


def params(seed: int = 0, **given: Any) -> SamplingParams:
    return SamplingParams(
        **(
            {"max_tokens": 150, "seed": seed, "structure": Structure.of("json_schema", SCHEMA)}
            | given
        )
    )


def valid(completion: Completion) -> bool:
    jsonschema.validate(json.loads(completion.text), SCHEMA)
    return completion.finish_reason == "stop"


def test_a_schema_is_followed_whatever_else_is_asked(llm: LLM) -> None:
    completions = llm.generate([PROMPT], params(n=4))
    assert (
        all(map(valid, completions)) and len({completion.text for completion in completions}) == 4
    )
    for asked in (
        {"temperature": 0},
        {"presence_penalty": 1.0},
        {"top_k": 3},
        {"logit_bias": {5: 3.0}},
        {"logprobs": 2},
    ):
        (completion,) = llm.generate([PROMPT], params(**asked))
        assert valid(completion)
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
    pieces = list(llm.stream(PROMPT, params()))
    assert "".join(piece.text for piece in pieces) == completions[0].text


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[A-Z][a-z]{2,8}, [0-9]{1,3}( years)?", "[A-Z][a-z]{2,8}, [0-9]{1,3}( years)?"),
        ("choice", ["a fox", "a bear", "Ωmega – “x”"], "a fox|a bear|Ωmega – “x”"),
        (
            "lark",
            'start: "[" (word ",")* word "]"\nword: "fox" | "bear"',
            r"\[((fox|bear),)*(fox|bear)\]",
        ),
        ("json_object", True, r"\{(.|\n)*\}?"),
    ],
)
def test_other_kinds(llm: LLM, kind: str, value: Any, pattern: str) -> None:
    for completion in llm.generate([PROMPT], params(structure=Structure.of(kind, value), n=3)):
        assert re.fullmatch(pattern, completion.text), completion.text


def test_decomposed_letters_beside_a_tokenizer_that_composes_them(tmp_path: Path) -> None:
    """A file name as macOS writes it, whole and streamed, forced and not."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SMALL / name, tmp_path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    text = "cafe\u0301.txt"
    structure = Structure.of("json_schema", {"enum": [text]})
    with LLM(tmp_path, options=OPTIONS) as llm:
        for logprobs in (None, 0):  # tokens are forced where nobody asks for log-probabilities
            asked = SamplingParams(structure=structure, max_tokens=40, logprobs=logprobs)
            (whole,) = llm.generate([PROMPT], asked)
            assert json.loads(whole.text) == text
            assert json.loads("".join(piece.text for piece in llm.stream(PROMPT, asked))) == text
        (stopped,) = llm.generate([PROMPT], replace(asked, stop=["\u00e9", "\u0301"]))
        assert (stopped.text, stopped.stopped_by) == ('"cafe', "\u0301")


def test_no_step_is_compiled_for_grammars_after_all_are_ready(llm: LLM) -> None:
    llm.warm_up()
    compiles = llm.runner.compiles_after_ready  # by other engines of this process
    # More rows than are written at once, and some of them wait.
    prompts = [f"{PROMPT} {i}" for i in range(9)]
    several = [
        params(i, structure=None if i % 3 == 2 else Structure.of("json_schema", SCHEMA))
        for i in range(9)
    ]
    assert (
        sum(completion.finish_reason == "stop" for completion in llm.generate(prompts, several))
        >= 6
    )
    assert llm.runner.compiles_after_ready == compiles


def test_what_cannot_be_had_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(
        GrammarError, match=r"^json_schema cannot be used: /uniqueItems cannot be followed: "
    ):
        structure = Structure.of("json_schema", {"uniqueItems": True})
        llm.generate([PROMPT], params(structure=structure))
    with pytest.raises(
        RequestError, match=r"^regex has 70000 bytes; the limit is 65536 \(--max-grammar-bytes\)$"
    ):
        llm.generate([PROMPT], params(structure=Structure.of("regex", "a" * 70000)))


@pytest.mark.slow
def test_drafts_and_preemption_change_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the schema come again and again: they are forced, and where they cannot be, drafts
    of them are right.
    """
    structure = Structure.of(
        "json_schema", {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}
    )
    asked = [params(0, max_tokens=220, structure=structure)]
    asked.append(replace(asked[0], temperature=0, logprobs=0))
    expected = [completion.text for completion in llm.generate([PROMPT] * 2, asked)]
    monkeypatch.setattr(
        "jaxserve.engine.engine.Engine.set_step_costs", lambda *_: None
    )  # drafts are tried, whether they pay or not
    with LLM(SMALL, options=replace(OPTIONS, speculate="ngram", draft_tokens=3)) as drafting:
        completions = drafting.generate([PROMPT] * 2, asked)
        assert [completion.text for completion in completions] == expected
        assert completions[1].timings.accepted_tokens
    with LLM(SMALL, options=replace(OPTIONS, cache_tokens=256)) as crowded:
        assert [
            completion.text for completion in crowded.generate([PROMPT] * 4, asked * 2)
        ] == expected * 2
        assert crowded.engine.scheduler.preemptions


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": ["fox", "bear"]}))
    common = [
        "--prompt",
        PROMPT,
        "--max-tokens",
        "20",
        "--seed",
        "1",
        "--max-batch",
        "1",
        "--max-context",
        "128",
    ]
    common += ["--model", str(SMALL)]
    assert main([*common, "--json-schema", str(file)]) == 0
    assert capsys.readouterr().out.strip() in ('"fox"', '"bear"')
    assert main([*common, "--choice", "fox", "--choice", ""]) == 2
    assert "--choice[1] is ''" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*common, "--regex", "a", "--json-object"])


# ---- published schemas

COUNT = 300  # schemas
LONGEST = 400  # tokens of an answer


def published() -> list[tuple[str, Any, Any]]:
    """Name, validator's class and schema of every schema of the JSON Schema Test Suite, in a random
    order.
    """
    data = os.environ.get("JAXSERVE_TEST_DATA")
    if not data:
        pytest.skip("JAXSERVE_TEST_DATA names no folder with the JSON Schema Test Suite")
    suite = Path(data) / "json_schema" / "JSON-Schema-Test-Suite" / "tests"
    found = [
        (f"{folder}/{path.stem}: {case['description']}", kind, _of_draft(case["schema"], kind))
        for folder, kind in (
            ("draft7", jsonschema.Draft7Validator),
            ("draft2020-12", jsonschema.Draft202012Validator),
        )
        for path in sorted((suite / folder).glob("*.json"))
        for case in json.loads(path.read_text())
        if r"\p" not in json.dumps(case["schema"])  # which Python's regular expressions do not know
    ]
    random.Random(11).shuffle(found)
    return found


def _of_draft(schema: Any, kind: Any) -> Any:
    """References are resolved otherwise in newer drafts."""
    return (
        {"$schema": kind.META_SCHEMA["$schema"], **schema} if isinstance(schema, dict) else schema
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_published_schemas() -> None:
    """Whatever ends by its grammar is JSON that another validator accepts, and hardly anything ends
    otherwise.
    """
    options = EngineOptions(max_batch=32, page_size=16, cache_tokens=32 * 512, max_context=512)
    with LLM(BUNDLED, options=options) as llm:
        chosen = []
        prepared = []
        for name, kind, schema in published():
            if len(chosen) == COUNT:
                break
            try:
                asked = params(
                    len(chosen), max_tokens=LONGEST, structure=Structure.of("json_schema", schema)
                )
                prepared.append(llm.prepare("Here is some JSON:", asked))
            except GrammarError:
                continue
            chosen.append((name, kind, schema))
        assert len(chosen) == COUNT
        cut = []
        for delta in llm.run(prepared):
            if completion := delta.completion:
                name, kind, schema = chosen[delta.prompt_index]
                if completion.finish_reason == "length":
                    cut.append(name)
                    continue
                assert completion.finish_reason == "stop", (name, completion.error)
                kind(schema).validate(json.loads(completion.text))
        print(len(cut), "answers were cut off:", *cut, sep="\n  ")
        assert len(cut) <= 0.05 * COUNT
