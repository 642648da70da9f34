"""Requests to a model whose files have tokens that it does not have, and an id without a token.

Answers are those of the checkpoint whose files do not name these tokens. Origins of the kind:
mlc-ai/xgrammar#237 (grammars with fewer ids than tokens), mlc-ai/mlc-llm#2651 (ids without a token
in grammars).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.chat import Chat
from jaxserve.completion import Completion
from jaxserve.config import EngineOptions
from jaxserve.errors import RequestError
from jaxserve.generate.__main__ import main
from jaxserve.llm import LLM
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.structure import Structure
from jaxserve.tokenizer import load_tokenizer
from tests.jaxserve.letters import END, EOT, HOLE, IMAGE, LETTERS, VOCAB, with_letters

OPTIONS = EngineOptions(max_batch=4, step_tokens=32, page_size=8, cache_tokens=1024, max_context=64)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["[1,2,<image>]", '{"a":0}', "<|eot|>", [HOLE, 0, END, VOCAB - 1], "<end>abc"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<image>{% endif %}"
    "[{{ m.content }}]{% endfor %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint whose files name missing tokens, and the same one whose files do not."""
    root = tmp_path_factory.mktemp("letters")
    made = {
        "more": with_letters("llama_gqa", root / "more"),
        "plain": with_letters("llama_gqa", root / "plain", missing=False),
    }
    for folder in made.values():
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(folders["more"], options=OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(folders["plain"], options=OPTIONS) as llm:
        yield llm


def answers(completions: list[Completion]) -> list[Any]:
    """What is compared: all that a completion says, without its name and times."""
    return [
        (c.prompt_token_ids, c.token_ids, c.text, c.finish_reason, c.logprobs, c.prompt_logprobs)
        for c in completions
    ]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"stop_token_ids": [VOCAB - 1, HOLE, 3]},
        {"logit_bias": {HOLE: 100.0}, "max_tokens": 4},
        {"logit_bias": {VOCAB - 1: 100.0}},
        {"allowed_token_ids": [HOLE, 3, VOCAB - 1]},
        {"ignore_eos": True, "logprobs": MAX_LOGPROBS},
        {"prompt_logprobs": MAX_LOGPROBS, "max_tokens": 2},
        {"temperature": 1.3, "seed": 5, "n": 3},
        {"structure": Structure.of("regex", "[0-4]{3}<(image|eot)>")},
        {"structure": Structure.of("regex", "[0-4a-f]{6}"), "logit_bias": {HOLE: 100.0}},
        {"structure": Structure.of("regex", "[ab]{6}"), "logit_bias": {VOCAB - 1: 100.0}},
        {"structure": Structure.of("choice", ["abc", "0,1"])},
        {"structure": Structure.of("json_schema", {"type": "array", "items": {"enum": [0, 1]}})},
    ],
    ids=lambda given: "-".join(given) or "greedy",
)
def test_answers_are_those_of_files_without_the_tokens(
    llm: LLM, plain: LLM, given: dict[str, Any]
) -> None:
    asked = replace(GREEDY, **given)
    found = llm.generate(PROMPTS, asked)
    assert answers(found) == answers(plain.generate(PROMPTS, asked))
    if asked.structure:
        assert not any({HOLE, END} & set(c.token_ids[:-1]) for c in found)
        assert all(c.token_ids[-1] not in (HOLE, *range(VOCAB, EOT + 1)) for c in found)


@pytest.mark.parametrize("token", [VOCAB, IMAGE, EOT, 2**31 - 1, -1])
@pytest.mark.parametrize(
    "field", ["stop_token_ids", "logit_bias", "allowed_token_ids", "the prompt"]
)
def test_an_id_that_the_model_does_not_have(llm: LLM, field: str, token: int) -> None:
    given: Any = {field: {token: 1.0} if field == "logit_bias" else [0, token]}
    with pytest.raises(RequestError, match=rf"{token}\b.*{VOCAB}|{token}\b.*{VOCAB - 1}"):
        if field == "the prompt":
            llm.generate([[0, token]], GREEDY)
        else:
            llm.generate(["a"], replace(GREEDY, **given))


def test_an_id_without_a_token_is_an_empty_text(llm: LLM) -> None:
    (found,) = llm.generate(["a"], replace(GREEDY, logit_bias={HOLE: 100.0}, logprobs=1))
    assert set(found.token_ids) == {HOLE} and found.text == ""
    assert found.logprobs
    assert llm.model.tokenizer.token_text(HOLE) == f"<id {HOLE}>"


def test_conversations(llm: LLM, plain: LLM) -> None:
    talk = [{"role": "user", "content": "<image>"}, {"role": "user", "content": "a<|eot|>b"}]
    assert answers(llm.chat(talk, GREEDY)) == answers(plain.chat(talk, GREEDY))
    assert all(token < VOCAB for c in llm.chat(talk, GREEDY) for token in c.prompt_token_ids)


def test_a_conversation_in_which_the_template_writes_one(llm: LLM, plain: LLM) -> None:
    talk = [{"role": "system", "content": "a"}]
    refused = f"'<image>', which is token {IMAGE}, but the model's ids are 0 to {VOCAB - 1}"
    with pytest.raises(RequestError, match=refused):
        llm.chat(talk, GREEDY)
    written = plain.prompts.chat.render(talk, "messages")
    assert written.text == "<image>[a]", "where no file says that it is a token, it is text"
    (note,) = llm.chat_notes
    assert note.startswith(f"the template has '<image>' ({IMAGE}), which the model does not have")


@pytest.fixture
def thinking(tmp_path: Path) -> Chat:
    """A template that cuts thoughts off, and a tokenizer whose <think> and </think> are missing."""
    library = tokenizers.Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Fuse()
    library.add_tokens(["<think>", "</think>"])
    library.add_special_tokens(["<|end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}"
        "{% if m.role == 'system' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    return Chat(tmp_path, load_tokenizer(tmp_path, 96))


def test_a_template_that_looks_for_a_missing_token(thinking: Chat) -> None:
    talk = [{"role": "assistant", "content": "<think>x</think>y"}]
    assert thinking.render(talk).text == "y"
    talk = [{"role": "user", "content": "<think>x</think>y<|end|>"}]
    asked = thinking.render(talk)
    assert "".join(chr(32 + token) for token in asked.token_ids) == talk[0]["content"]
    thinking.close()


def test_a_template_that_writes_a_missing_token_by_a_variable(thinking: Chat) -> None:
    talk = [{"role": "system", "content": "a"}]
    with pytest.raises(RequestError, match=r"prompt has '<\|end\|>', which is token 98"):
        thinking.render(talk)
    (note,) = thinking.notes
    assert "'</think>' (97), '<|end|>' (98), which the model does not have" in note
    thinking.close()


def test_what_is_said_at_the_start(
    llm: LLM, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    missing, ends = llm.token_notes
    assert missing == (
        f"the tokenizer's files have '<image>' ({IMAGE}), '<|eot|>' ({EOT}), but the model's ids "
        f"are 0 to {VOCAB - 1}: such names are text"
    )
    assert ends == f"the model does not have the end tokens [{EOT}]: answers end with [{END}]"
    sizes = ["--max-context", "64", "--step-tokens", "32", "--max-batch", "1"]
    main([str(folders["more"]), *sizes, "--max-tokens", "2", "--prompt", "a"])
    said = capsys.readouterr().err
    assert missing in said and ends in said


@pytest.mark.slow
def test_a_draft_model_with_other_missing_tokens_and_holes(
    folders: dict[str, Path], plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft has text where the model has a hole, and the other way round."""
    draft = with_letters("llama_gqa", tmp_path / "draft")
    file = draft / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    vocabulary |= {LETTERS[HOLE]: HOLE}
    del vocabulary["f"]
    file.write_text(json.dumps(fields))
    options = replace(OPTIONS, speculate="draft", draft_tokens=2)
    # Everything is tried: without costs of the steps nothing is too expensive to draft.
    monkeypatch.setattr("jaxserve.engine.engine.Engine.set_step_costs", lambda *_: None)
    with LLM(folders["more"], options=options, draft_model=draft) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    expected = plain.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
