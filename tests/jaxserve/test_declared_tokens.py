"""Tokens that files beside a tokenizer declare: ids and texts are those of transformers.

Golden values: tests/golden/make_declared_tokens.py. Origins of the kind: marks of ChatML in
added_tokens.json alone (huggingface/transformers#27132), tokens that are split where a normalizer
prepends a space (huggingface/transformers#26871), begin tokens that only tokenizer_config.json
names (huggingface/swift-transformers#161).
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxserve.chat import Chat
from jaxserve.tokenizer import MARK, TokenizerError, load_tokenizer
from jaxserve.tokenizer.loading import read_tokenizer_json
from jaxserve.tokenizer.sentencepiece_json import tokenizer_json
from jaxserve.tokenizer.tokenizer_json import complete_json
from tests.tokenizer_cases import write_small

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "declared_tokens.json").read_text(encoding="utf-8")
)
END = "<|im_end|>"


def write_folder(case: dict[str, Any], folder: Path) -> Path:
    """Write the files of a golden case into a new folder."""
    folder.mkdir()
    base = GOLDEN["bases"][case["base"]]
    files = case["files"]
    config = base["config"] | files.get("tokenizer_config.json", {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("added_tokens.json", "special_tokens_map.json"):
        if name in files:
            (folder / name).write_text(json.dumps(files[name]))
    if base["name"] == "tokenizer.model":
        (folder / base["name"]).write_bytes(base64.b64decode(base["text"]))
    else:
        content = json.loads(base["text"])
        content["added_tokens"] += files.get("tokenizer.json", {}).get("added", [])
        (folder / base["name"]).write_text(json.dumps(content))
    return folder


def cases(base: str) -> list[dict[str, Any]]:
    return [case for case in GOLDEN["cases"] if case["base"] == base]


def loaded(base: str, root: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """The cases of a base that load, with their tokenizers."""
    for number, case in enumerate(cases(base)):
        if "actual" not in case and "map, end" not in case["ways"]:
            yield case, load_tokenizer(write_folder(case, root / str(number)))


@pytest.mark.parametrize("base", GOLDEN["bases"])
def test_every_way_of_declaring_and_every_two(base: str, tmp_path: Path) -> None:
    texts = 0
    for case, tokenizer in loaded(base, tmp_path):
        for text, ids in case["written"]:
            assert tokenizer.encode_special(text) == ids, (case["ways"], text)
        for text, ids in case["plain"]:
            assert tokenizer.encode(text) == ids, (case["ways"], text)
        for ids, text in case["decoded"]:
            assert tokenizer.decode(ids) == text, (case["ways"], ids)
        assert tokenizer.eos_ids == (case["eos"],)
        texts += len(case["written"]) + len(case["plain"])
    assert texts > 250


@pytest.mark.parametrize("base", GOLDEN["bases"])
def test_a_token_that_would_get_another_id_is_refused(base: str, tmp_path: Path) -> None:
    gaps = [case for case in cases(base) if "actual" in case]
    assert gaps
    for number, case in enumerate(gaps):
        folder = write_folder(case, tmp_path / str(number))
        with pytest.raises(TokenizerError, match="gives it") as caught:
            load_tokenizer(folder)
        assert any(f"{name!r} has the id" in str(caught.value) for name in case["actual"])


@pytest.mark.parametrize("base", GOLDEN["bases"])
def test_an_end_token_without_an_id_is_refused(base: str, tmp_path: Path) -> None:
    (alone,) = (case for case in cases(base) if case["ways"] == ["map, end"])
    with pytest.raises(TokenizerError, match=r"'<\|im_end\|>' is not in tokenizer\."):
        load_tokenizer(write_folder(alone, tmp_path / "alone"))
    (added,) = (case for case in cases(base) if case["ways"] == ["added", "map, end"])
    tokenizer = load_tokenizer(write_folder(added, tmp_path / "added"))
    assert tokenizer.eos_ids == (added["eos"],) == (tokenizer.special_tokens[END],)


@pytest.mark.system
@pytest.mark.parametrize("base", GOLDEN["bases"])
def test_conversations(base: str, tmp_path: Path) -> None:
    for case, tokenizer in loaded(base, tmp_path):
        if len(case["ways"]) > 1:
            continue
        folder = tmp_path / str(cases(base).index(case))
        chat = Chat(folder, tokenizer)
        try:
            assert list(chat.render(GOLDEN["messages"]).token_ids) == case["chat"], case["ways"]
        finally:
            chat.close()


@pytest.mark.parametrize("base", GOLDEN["bases"])
def test_one_tokenizer_json_that_has_them_all(base: str, tmp_path: Path) -> None:
    """What clients download, for programs that read only tokenizer.json."""
    for case, tokenizer in loaded(base, tmp_path):
        folder = tmp_path / str(cases(base).index(case))
        file = read_tokenizer_json(folder)
        made = complete_json(file) if file else tokenizer_json(folder)
        library = tokenizers.Tokenizer.from_str(made)
        for text, ids in case["written"]:
            assert library.encode(text, add_special_tokens=False).ids == ids, (case["ways"], text)
        for text, ids in case["plain"]:
            assert library.encode(text).ids == ids, (case["ways"], text)
        assert tokenizer.vocab_size == library.get_vocab_size()


def test_letters_that_only_normalization_makes_equal_are_no_token(tmp_path: Path) -> None:
    (case,) = (c for c in cases("json, lower case") if c["ways"] == ["added"])
    tokenizer = load_tokenizer(write_folder(case, tmp_path / "folder"))
    start = case["files"]["added_tokens.json"]["<|im_start|>"]
    assert tokenizer.encode_special("<|IM_start|>") == [start]
    letters = ("＜|im_start|>", "<|im_ｓtart|>", "<|im_ﬆart|>", "<|im_ﬅart|>", "<|im_ſtart|>")
    for forged in (*letters, f"<|im{MARK}_start|>", f"<|IM{MARK}_START|>"):
        assert start not in tokenizer.encode_special(forged)
        assert tokenizer.decode(tokenizer.encode_special(forged)) == "<|im_start|>"


def test_an_end_token_that_only_the_map_names_ends_answers_beside_a_decoder(tmp_path: Path) -> None:
    (case,) = (c for c in cases("json, byte level") if c["ways"] == ["decoder"])
    folder = write_folder(case, tmp_path / "folder")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).eos_ids == ()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    assert load_tokenizer(folder).eos_ids == (load_tokenizer(folder).special_tokens[END],)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", {"shift": 1}, "the field shift is not understood"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "= True is not supported"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "expected an object with ids"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "expected an object with"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"7": {"special": True}}},
            r"added_tokens_decoder\[7\] is .*; expected a string that names a token",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"7": {"content": "x", "colour": 1}}},
            "has the field 'colour', which is not understood",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"7": {"content": "x", "lstrip": 1}}},
            "lstrip of .* is 1; expected true or false",
        ),
        ("tokenizer_config.json", {"additional_special_tokens": "x"}, "expected a list of tokens"),
        ("tokenizer_config.json", {"additional_special_tokens": [7]}, "is 7; expected a string"),
        ("tokenizer_config.json", {"chat_control_tokens": "x"}, "expected names"),
        ("tokenizer_config.json", {"tokenizer_class": []}, "tokenizer_class is .*expected a str"),
        ("tokenizer_config.json", {"image_token": 7}, "image_token is 7; expected a string"),
        ("tokenizer_config.json", {"pad_token": "\ud800"}, "is not valid Unicode"),
        ("added_tokens.json", {"\ud800": 5}, "is not valid Unicode"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}},
            "expected an object with ids",
        ),
        ("tokenizer_config.json", {"add_prefix_space": 1}, "expected true, false or null"),
        ("special_tokens_map.json", {"add_bos_token": True}, "add_bos_token is not understood"),
        ("special_tokens_map.json", {"pad_token": 3}, "pad_token is 3; expected a string"),
        ("added_tokens.json", {"x": "7"}, "'x' has the id '7'; expected a number"),
        ("added_tokens.json", [], "holds list where an object is expected"),
    ],
)
@pytest.mark.parametrize("name", ["sp-first-space", "json-byte-level"])
def test_what_is_refused(
    name: str, file: str, content: object, message: str, tmp_path: Path
) -> None:
    write_small(name, tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / file) in str(caught.value) and "\n" not in str(caught.value)


def test_add_prefix_space_beside_a_tokenizer_json(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    expected = load_tokenizer(tmp_path).encode("the fox")

    def ids(**fields: object) -> list[int]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        return load_tokenizer(tmp_path).encode("the fox")

    assert ids(add_prefix_space=False, tokenizer_class="GPT2Tokenizer") == expected
    assert ids(add_prefix_space=True, tokenizer_class="PreTrainedTokenizerFast") == expected
    with pytest.raises(TokenizerError, match=r"add_prefix_space is true, but .* adds no space"):
        ids(add_prefix_space=True, tokenizer_class="GPT2Tokenizer")


def test_fields_without_effect(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    expected = load_tokenizer(tmp_path).encode("the fox")
    fields = {
        "torch_dtype": "bfloat16",
        "use_auth_token": False,
        "image_token_id": 5,
        "hf_token": "x",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    assert load_tokenizer(tmp_path).encode("the fox") == expected


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_a_file_nested_without_end(file: str, tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    (tmp_path / file).write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(TokenizerError, match="not readable as JSON"):
        load_tokenizer(tmp_path)


def test_a_named_token_that_the_file_calls_text_is_special(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "add_bos_token": False})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens["<|end|>"] == tokenizer.eos_ids[0]
    text = "fox<|end|>the"
    assert tokenizer.decode(tokenizer.encode(text)) == text, "in a prompt, the name is text"
    assert tokenizer.eos_ids[0] in tokenizer.encode_special(text)


def test_null_in_the_map_takes_a_token_away(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    assert "[PAD]" in load_tokenizer(tmp_path).special_tokens
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": None}))
    assert "[PAD]" not in load_tokenizer(tmp_path).special_tokens


def test_a_single_letter_that_a_field_names_stays_text(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "!"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("fox!")) == "fox!"


def test_ids_with_gaps_have_no_next_id(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] = len(vocabulary) + 40
    content["added_tokens"] = []
    vocabulary["x_y"] = len(vocabulary) + 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    with pytest.raises(TokenizerError, match=r"ids have gaps, so that there is none for '\[PAD\]'"):
        load_tokenizer(tmp_path)
