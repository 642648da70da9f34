"""Vocabularies of byte pairs: tiktoken.model of Kimi, and tekken.json of Mistral."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxserve.tokenizer import TokenizerError, load_tokenizer
from jaxserve.tokenizer.loading import read_tokenizer_json
from jaxserve.tokenizer.tokenizer_json import complete_json

GOLDEN = Path(__file__).parents[1] / "golden"
KIMI = GOLDEN / "tokenizer_kimi"
TEKKEN = GOLDEN / "tokenizer_tekken"
FOLDERS = (KIMI, TEKKEN)
# Ids of Kimi K2's whole vocabulary, from tests/kimi_tests.rs of github.com/ml-rust/splintr, which
# took them from tiktoken.
PUBLISHED = {
    "Hello world": [19180, 2695],
    "Hello, world!": [19180, 11, 2695, 0],
    "你好世界": [33845, 2243],
    "1234567890": [6694, 12972, 16242, 15],
    "中文English混合": [16717, 44372, 13935],
}


def vectors(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "vectors.json").read_text())


def declared(name: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": name, **flags, "special": special}


def copied(folder: Path, to: Path) -> Path:
    """Copy a vocabulary, and write tokenizer_config.json as Kimi K2 has it."""
    for file in ("tiktoken.model", "tekken.json"):
        if (folder / file).exists():
            shutil.copy(folder / file, to / file)
    if folder == KIMI:
        size = len(vectors(KIMI)["ranks"])
        names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 255: "[PAD]"}
        config = {
            "added_tokens_decoder": {str(size + at): declared(name) for at, name in names.items()},
            "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "extra_special_tokens": {},
            "pad_token": "[PAD]",
            "tokenizer_class": "TikTokenTokenizer",
            "unk_token": "[PAD]",
        }
        (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_ids_are_those_of_other_libraries(folder: Path, tmp_path: Path) -> None:
    found = vectors(folder)
    offset = 0 if folder == KIMI else 1000
    ids = {rank: offset + at for at, rank in enumerate(found["ranks"])}
    tokenizer = load_tokenizer(copied(folder, tmp_path))
    for case in found["cases"]:
        expected = [ids[rank] for rank in case["ranks"]]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == expected, case["text"]
        assert tokenizer.decode(expected) == case["text"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_text_is_split_as_elsewhere(folder: Path, tmp_path: Path) -> None:
    file = read_tokenizer_json(copied(folder, tmp_path))
    assert file
    splitter = tokenizers.Tokenizer.from_str(file.text).pre_tokenizer
    for case in vectors(folder)["cases"]:
        text = case["text"]
        pieces = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
        assert pieces == case["pieces"], text


def test_the_vectors_of_kimi_are_the_published_ones() -> None:
    cases = {case["text"]: case["ranks"] for case in vectors(KIMI)["cases"]}
    assert {text: cases[text] for text in PUBLISHED} == PUBLISHED


def test_special_tokens_of_kimi(tmp_path: Path) -> None:
    size = len(vectors(KIMI)["ranks"])
    tokenizer = load_tokenizer(copied(KIMI, tmp_path))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (size + 256, size)
    assert tokenizer.eos_ids == (size + 1,)
    assert tokenizer.special_tokens["<|im_user|>"] == size + 3
    assert tokenizer.special_tokens[f"<|reserved_token_{size + 4}|>"] == size + 4
    text = "<|im_user|>Hello world<|im_end|>"
    assert tokenizer.encode_special(text)[::3] == [size + 3, size + 2]
    assert size + 3 not in tokenizer.encode(text)
    assert tokenizer.encode("Hello world")[0] != size, "nothing is added before a text"


def test_special_tokens_of_tekken(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copied(TEKKEN, tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.special_tokens["[INST]"] == 3
    assert tokenizer.special_tokens["<SPECIAL_999>"] == 999
    assert tokenizer.encode("Hello world")[0] == 1
    assert tokenizer.encode_special("[INST]")[0] == 3


def test_special_tokens_that_tekken_lists(tmp_path: Path) -> None:
    content = json.loads((TEKKEN / "tekken.json").read_text())
    content["special_tokens"] = listed("<unk>", "<s>", "</s>", "[THINK]")
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    special = load_tokenizer(tmp_path).special_tokens
    assert (special["[THINK]"], special["<SPECIAL_4>"]) == (3, 4)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_programs_that_read_tokenizer_json_alone(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copied(folder, tmp_path))
    file = read_tokenizer_json(tmp_path)
    assert file
    library = tokenizers.Tokenizer.from_str(complete_json(file))
    texts = [case["text"] for case in vectors(folder)["cases"]]
    for text in (text for text in texts if "[INST]" not in text):  # such names are tokens there
        assert library.encode(text).ids == tokenizer.encode(text)


BYTES = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("!!! 0\n", "'!!!' is no base64"),
        ("AA==\n", "line 1 is 'AA=='; expected base64, a space and a rank"),
        ("AA== x\n", "expected base64, a space and a rank"),
        (BYTES.replace(" 255", " 256"), "ranks are not 0 to 255"),
        ("".join(BYTES.splitlines(True)[:100]), "lacks a token for 156 of 256 bytes"),
        (BYTES + "AA== 256\n", "ranks are not 0 to"),
        ("\u00e9", "not readable"),
    ],
)
def test_a_damaged_tiktoken_model(content: str, message: str, tmp_path: Path) -> None:
    copied(KIMI, tmp_path)
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(TokenizerError, match=message) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_declared_name_that_is_that_of_another_id(tmp_path: Path) -> None:
    copied(KIMI, tmp_path)
    size = len(vectors(KIMI)["ranks"])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"][str(size + 9)] = declared(f"<|reserved_token_{size + 10}|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="two special tokens have one name or one id"):
        load_tokenizer(tmp_path)


def test_errors_name_the_file_that_is_there(tmp_path: Path) -> None:
    copied(TEKKEN, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<none>"}')
    with pytest.raises(TokenizerError, match=r"'<none>' is not in tekken\.json"):
        load_tokenizer(tmp_path)


def test_a_word_of_millions_of_letters_is_refused(tmp_path: Path) -> None:
    """The library's regular expressions give up on it."""
    tokenizer = load_tokenizer(copied(TEKKEN, tmp_path))
    with pytest.raises(TokenizerError, match="too long for the tokenizer's pattern"):
        tokenizer.encode("\u0301" + "A" * 8_000_000)


def test_a_tiktoken_model_of_other_code(tmp_path: Path) -> None:
    shutil.copy(KIMI / "tiktoken.model", tmp_path)
    with pytest.raises(TokenizerError, match="how text is split is known for tokenization_kimi"):
        load_tokenizer(tmp_path)


CONFIG = {
    "pattern": ".",
    "default_vocab_size": 266,
    "default_num_special_tokens": 10,
    "version": "v13",
}
LONGER = CONFIG | {"default_vocab_size": 267}
VOCAB = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]


def listed(*names: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "token_str": name} for rank, name in enumerate(names)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config is no object"),
        ({"config": CONFIG | {"default_vocab_size": "x"}}, "default_vocab_size is 'x'"),
        ({"config": CONFIG | {"default_num_special_tokens": 0}}, "0 special tokens of 266"),
        ({"config": LONGER}, "256 tokens; config asks for 257"),
        ({"config": CONFIG | {"pattern": 1}}, "pattern is 1; expected a string"),
        ({"config": CONFIG | {"pattern": "("}}, "not a tekken.json"),
        ({"config": CONFIG | {"version": "v99"}}, "version 'v99' is not known"),
        ({"config": CONFIG | {"normalizer": 1}}, "the field 'normalizer' is not understood"),
        ({"normalizer": 1}, "the field 'normalizer' is not understood"),
        ({"vocab": {}}, "a vocab that is dict"),
        ({"vocab": [3, *VOCAB[1:]]}, "the entry 0 of vocab is 3"),
        ({"vocab": [VOCAB[1], *VOCAB[1:]]}, "the entry 0 of vocab is"),
        ({"vocab": [VOCAB[0], VOCAB[0] | {"rank": 1}, *VOCAB[2:]]}, "has a token twice"),
        (
            {"vocab": [*VOCAB, {"rank": 256, "token_bytes": "QUFB" * 400}], "config": LONGER},
            "tokens of up to 1200 and of",
        ),
        ({"special_tokens": None}, "special_tokens are missing"),
        ({"special_tokens": 3}, "entry 0 of special_tokens is 3"),
        ({"special_tokens": [{"rank": 1, "token_str": "x"}]}, "entry 0 of special_tokens is"),
        ({"special_tokens": listed("x", "x")}, "two special tokens have one name"),
        ({"special_tokens": listed(*"0123456789x")}, "11 special tokens, for 10 ids"),
        ({"special_tokens": listed("a")}, "special token and a token of text"),
    ],
)
def test_a_damaged_tekken(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = {"config": CONFIG, "vocab": VOCAB, "special_tokens": []} | change
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
