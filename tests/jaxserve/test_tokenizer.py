"""Loading, encoding and decoding of whole texts, against the libraries and published vectors."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.tokenizer import MARK, Tokenizer, TokenizerError, load_tokenizer
from jaxserve.tokenizer.special import NamedToken, NameSplitter
from tests.byte_tokenizer import ByteTokenizer
from tests.slow_cases import slow_but
from tests.tokenizer_cases import (
    SMALL,
    TEXTS,
    Case,
    build_case,
    case_names,
    train_sentencepiece,
    write_small,
)

UNSPELLABLE = "\U0010fffd"  # a character that no vocabulary here has as one piece


# Each has the library, and nearly the settings, of another one.
ALIKE = ("gpt_neox_20b/tokenizer.json", ".model.v2", ".model.v3")


@pytest.fixture(
    scope="module",
    params=slow_but(case_names(), [name for name in case_names() if not name.endswith(ALIKE)]),
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return build_case(request.param, tmp_path_factory.mktemp("tokenizer"))


def configured(folder: Path, **fields: object) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return load_tokenizer(folder)


def visible(case: Case, ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id not in case.special]


def one_replacement(text: str) -> str:
    """Replace runs of U+FFFD by one; libraries differ in how many stand for ill-formed bytes."""
    return re.sub("\ufffd+", "\ufffd", text)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_puts_affixes_around_what_the_library_says(case: Case, text: str) -> None:
    ids = case.tokenizer.encode(text)
    theirs = case.library_encode(text)
    starts = [start for start in (0, 1) if ids[start : start + len(theirs)] == theirs]
    assert starts
    affixes = {*ids[: starts[-1]], *ids[starts[-1] + len(theirs) :]}
    assert affixes <= {case.tokenizer.bos_id, 2}  # 2 is EOS in the one case that has a suffix


@pytest.mark.parametrize("text", TEXTS)
def test_decode_says_what_the_library_says(case: Case, text: str) -> None:
    ids = case.tokenizer.encode(text)
    assert case.tokenizer.decode(ids) == case.library_decode(visible(case, ids))


def test_decode_of_random_ids_says_what_the_library_says(case: Case) -> None:
    draw = random.Random(0)
    size = case.tokenizer.vocab_size
    samples = [
        [draw.randrange(min(size, draw.choice((300, size)))) for _ in range(draw.randrange(8))]
        for _ in range(999)
    ]
    both = [
        (case.tokenizer.decode(ids), case.library_decode(visible(case, ids))) for ids in samples
    ]
    comparable = [
        (ours, theirs) for ours, theirs in both if not (case.spoils_runs and "\ufffd" in theirs)
    ]
    assert len(comparable) > 200
    assert all(one_replacement(ours) == one_replacement(theirs) for ours, theirs in comparable)


def test_openings_of_a_text_say_what_the_library_says(case: Case) -> None:
    ids = range(case.tokenizer.vocab_size)
    texts = [case.tokenizer.token_text(index) for index in ids]
    spaces = [index for index in ids if texts[index].strip(" ") != texts[index]][:3]
    others = [
        0,
        *case.library_encode("a")[-1:],
        *list(case.special)[:1],
    ]  # 0 is a SentencePiece model's unknown piece
    for opening in itertools.product([*spaces, *others], repeat=3):
        theirs = case.library_decode(visible(case, list(opening)))
        spoiled = case.spoils_runs and "\ufffd" in theirs
        assert spoiled or one_replacement(case.tokenizer.decode(opening)) == one_replacement(theirs)


def test_names_of_special_tokens_are_text(case: Case) -> None:
    unknown = case.library_encode(UNSPELLABLE)
    spells_everything = UNSPELLABLE in case.tokenizer.decode(unknown)
    controls = {index: name for index, name in case.special.items() if index not in unknown}
    affixes = [index for index in case.tokenizer.encode("a") if index in controls]
    for name in list(controls.values())[:20]:
        ids = case.tokenizer.encode(f"a {name} b")
        assert [index for index in ids if index in controls] == affixes
        assert not spells_everything or f"a {name} b" in case.tokenizer.decode(ids)


def test_token_text_names_special_tokens_and_shows_no_broken_character(case: Case) -> None:
    size = case.tokenizer.vocab_size
    assert {case.tokenizer.token_text(index) for index in case.special} == set(
        case.special.values()
    )
    assert case.tokenizer.token_text(size) == f"<id {size}>"
    for index in range(0, size, 7):
        text = case.tokenizer.token_text(index)
        data, _ = case.tokenizer.token_bytes(index)
        assert text
        assert text.count("\ufffd") == data.count("\ufffd".encode())


def test_ids_outside_the_vocabulary_decode_to_nothing(case: Case) -> None:
    ids = case.tokenizer.encode("Hello")
    size = case.tokenizer.vocab_size
    assert case.tokenizer.decode([size, *ids, size + 1000, -1]) == case.tokenizer.decode(ids)


def test_half_a_surrogate_pair_is_refused(case: Case) -> None:
    with pytest.raises(TokenizerError, match="character 1 is half a surrogate pair"):
        case.tokenizer.encode("a\ud83d")


@pytest.mark.parametrize("name", SMALL)
def test_token_text_of_bytes(name: str, tmp_path: Path) -> None:
    tokenizer = build_case(name, tmp_path).tokenizer
    texts = {tokenizer.token_text(index) for index in range(tokenizer.vocab_size)}
    assert {"\n", "<0xF0>", "<0xFF>"} <= texts
    assert {" the", "the "} & texts


def test_gpt2_against_published_vectors(tmp_path: Path) -> None:
    data = os.environ.get("JAXSERVE_TEST_DATA")
    if not data:
        pytest.skip("JAXSERVE_TEST_DATA is not set")
    vectors = Path(data, "tokenizer_vectors")
    texts = (vectors / "gpt2.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [
        [int(number) for number in line.split()]
        for line in (vectors / "gpt2.out").read_text().splitlines()
    ]
    tokenizer = build_case("tokenizers/gpt2/tokenizer.json", tmp_path).tokenizer
    assert len(texts) - 1 == len(ids) == 46  # the file ends with a separator
    assert [tokenizer.encode(text) for text in texts[:-1]] == ids
    assert [tokenizer.decode(line) for line in ids] == texts[:-1]


LOSSLESS = re.compile(
    "gpt|mistral|deepseek|json|first-space"
)  # others drop spaces, or rewrite letters they lack


def test_round_trip_of_books(case: Case, request: pytest.FixtureRequest, data_folder: Path) -> None:
    for book in sorted((data_folder / "text").glob("*.txt")):
        text = book.read_text(encoding="utf-8")[-60_000:]
        ids = case.tokenizer.encode(text)
        decoded = case.tokenizer.decode(ids)
        assert decoded == case.library_decode(visible(case, ids))
        assert decoded == text or not LOSSLESS.search(request.node.callspec.params["case"])


def test_names_of_special_tokens_are_tokens_if_asked(case: Case) -> None:
    special = case.tokenizer.special_tokens
    inner = case.tokenizer.encode_inner
    assert set(special.values()) >= set(case.special) - {case.library_encode(UNSPELLABLE)[-1]}
    for name, token in list(special.items())[:9]:
        ids = case.tokenizer.encode_special(f"{name}the fox{name} the{name}")
        assert [i for i in ids if i == token] == [token] * 3 and ids[0] == ids[-1] == token
        assert ids == [token, *inner("the fox"), token, *inner(" the"), token]
        assert case.tokenizer.encode_special("the fox" + name) == [
            *case.library_encode("the fox"),
            token,
        ]
    assert case.tokenizer.encode_special("") == case.tokenizer.encode_special(MARK) == []


def test_a_mark_keeps_a_name_text(case: Case) -> None:
    spells_everything = UNSPELLABLE in case.tokenizer.decode(case.library_encode(UNSPELLABLE))
    named = [*case.tokenizer.special_tokens.items(), *case.tokenizer.added_tokens.items()]
    for name, token in named[:: 1 + len(named) // 60]:
        ids = case.tokenizer.encode_special(f"a{name[0]}{MARK}{name[1:]}b")
        assert token not in ids
        text = case.tokenizer.decode(ids)
        assert not spells_everything or text.replace(" ", "") == f"a{name}b".replace(" ", "")


def test_marks_leave_the_ids_of_a_text(case: Case) -> None:
    for text in TEXTS:
        if text:
            marked = MARK.join((text[:2], text[2:5], text[5:]))
            assert case.tokenizer.encode_special(marked) == case.library_encode(text)


def test_a_thousand_names_cost_little() -> None:
    splitter = NameSplitter(NamedToken(f"<|reserved_{number}|>", number) for number in range(1000))
    text = "A < B, <|reserved, <|reserved_1000|>. " * 40_000 + "<|reserved_77|>"
    started = time.thread_time()
    ids = splitter.encode(text, lambda part, opening: [len(part), opening])
    assert ids == [len(text) - len("<|reserved_77|>"), True, 77]
    assert time.thread_time() - started < 60, "with a group for each name it takes minutes"


@pytest.mark.parametrize("legacy", [True, False, None])
def test_text_after_a_special_token_opens_nothing_but_in_legacy_models(
    legacy: bool | None, tmp_path: Path
) -> None:
    write_small("sp-first-space", tmp_path)
    tokenizer = configured(tmp_path, legacy=legacy)
    words = [tokenizer.token_text(i) for i in tokenizer.encode_special("the<s>the")]
    assert words[:2] == [" the", "<s>"] and "".join(words[2:]) == (" the" if legacy else "the")


def test_user_defined_symbols_are_added_tokens(tmp_path: Path) -> None:
    write_small("sp-every-space", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ((name, token),) = tokenizer.added_tokens.items()
    assert (
        name == "<tool>"
        and token in tokenizer.encode("a<tool>b")
        and token in tokenizer.encode_special("<tool>")
    )
    assert list(tokenizer.special_tokens) == ["<s>", "</s>"]


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ({}, "a [x] b", ["a", " ", "[x]", " b"]),
        ({"lstrip": True}, "a [x] b", ["a", "[x]", " b"]),
        ({"rstrip": True}, "a [x] b", ["a", " ", "[x]", "b"]),
        ({"single_word": True}, "a [x] [x]b c[x]", ["a", " ", "[x]", " [x]b c[x]"]),
    ],
)
def test_white_space_and_words_around_special_tokens(
    flags: dict, text: str, expected: list, tmp_path: Path
) -> None:
    library = tokenizers.Tokenizer(
        models.BPE({letter: i for i, letter in enumerate("abcx[]Ġ")}, [])
    )
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    library.add_special_tokens([tokenizers.AddedToken("[x]", normalized=False, **flags)])
    library.save(str(tmp_path / "tokenizer.json"))
    ids = load_tokenizer(tmp_path).encode_special(text)
    assert ids == library.encode(text).ids, (
        "the library does the same with a text that nobody forged"
    )
    assert "".join(load_tokenizer(tmp_path).token_text(i) for i in ids) == "".join(expected)


@pytest.mark.parametrize(
    ("name", "fields", "prefix", "suffix"),
    [
        ("sp-first-space", {}, [1], []),
        ("sp-first-space", {"add_bos_token": False}, [], []),
        ("sp-first-space", {"add_bos_token": None, "add_eos_token": True}, [1], [2]),
        ("sp-first-space", {"add_bos_token": True, "bos_token": {"content": "</s>"}}, [2], []),
        ("json-byte-level", {}, [0], []),
        ("json-byte-level", {"add_bos_token": False}, [], []),
        ("json-byte-level", {"add_eos_token": True, "eos_token": "<|end|>"}, [0], [1]),
        ("json-byte-level", {"add_bos_token": True, "bos_token": {"content": "<|end|>"}}, [1], []),
        ("json-byte-level", {"bos_token": "", "eos_token": ""}, [0], []),
        ("json-byte-fallback", {}, [1], [2]),
        ("json-byte-fallback", {"add_eos_token": False}, [1], []),
    ],
)
def test_settings_decide_the_affixes(
    name: str, fields: dict[str, object], prefix: list[int], suffix: list[int], tmp_path: Path
) -> None:
    write_small(name, tmp_path)
    bare = configured(tmp_path, add_bos_token=False, add_eos_token=False).encode("the fox")
    assert configured(tmp_path, **fields).encode("the fox") == [*prefix, *bare, *suffix]


def test_special_ids(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    silent = load_tokenizer(tmp_path)
    assert (silent.bos_id, silent.eos_ids) == (0, ())
    named = configured(tmp_path, bos_token=None, eos_token={"content": "<|end|>", "lstrip": False})
    assert (named.bos_id, named.eos_ids) == (0, (1,))


def test_sentencepiece_model_without_bos(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, bos_id=-1, eos_id=-1)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, ())
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    with pytest.raises(TokenizerError, match="add_bos_token is true, but no bos_token is known"):
        configured(tmp_path, add_bos_token=True)


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    write_small("sp-first-space", tmp_path)
    write_small("json-byte-level", tmp_path)
    assert load_tokenizer(tmp_path).token_text(0) == "<|begin|>"


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps over the lazy dog"
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode(text)) == text
    assert len(load_tokenizer(tmp_path).encode("")) == 1


def test_added_token_outside_the_byte_alphabet_is_its_own_text(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("<think>｜")
    assert [tokenizer.token_text(index) for index in ids] == ["<|begin|>", "<think>", "｜"]
    assert tokenizer.decode(ids) == "<think>｜"


def test_unigram_vocabulary_refuses_names_of_control_tokens(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0), ("▁", -2.0)], unk_id=0)
    )
    library.add_special_tokens(["<unk>", "</s>"])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a z") == [2, 3, 0]
    assert tokenizer.decode([2, 3, 2]) == "a  a"
    with pytest.raises(TokenizerError, match="holds '</s>', which this tokenizer cannot spell"):
        tokenizer.encode("a </s>")
    assert tokenizer.encode_special("a</s>") == [2, 1]
    assert tokenizer.encode_special(f"a <{MARK}/s>") == [2, 3, 0, 3, 0], "cut there, it is no name"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Replace("ab", "c"),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_decoders_whose_tokens_depend_on_neighbours_are_refused(
    decoder: object, tmp_path: Path
) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"^tokenizer\.json: decoder .* is not supported.*$"):
        load_tokenizer(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"has none of tokenizer\.json, tekken\.json, .*; copy one"
    ) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"version": "1.0", "model":'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_corrupt_tokenizer_file(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match="copy the file again") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("piece", [b"<0x0A>", b"<s>", b"llo"])
def test_sentencepiece_model_with_a_piece_that_is_no_text(piece: bytes, tmp_path: Path) -> None:
    write_small("sp-first-space", tmp_path)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(path.read_bytes().replace(piece, b"\xff" * len(piece)))
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path)


def test_truncated_sentencepiece_model(tmp_path: Path) -> None:
    write_small("sp-first-space", tmp_path)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["sp-first-space", "json-byte-level"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("[]", "holds list where an object is expected"),
        ('{"add_bos_token": "yes"}', "add_bos_token is 'yes'; expected true, false or null"),
        ('{"eos_token": 2}', "eos_token is 2; expected a string"),
        ('{"eos_token": {"content": 2}}', "expected a string"),
        ('{"bos_token": "<nowhere>"}', "'<nowhere>' is not in tokenizer."),
    ],
)
def test_bad_settings(name: str, content: str, message: str, tmp_path: Path) -> None:
    write_small(name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_byte_tokenizer_keeps_the_protocol() -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    ids = tokenizer.encode("né")
    assert ids == [256, 0x6E, 0xC3, 0xA9]
    assert tokenizer.decode([*ids, 257]) == "né"
    assert [tokenizer.token_text(index) for index in ids] == ["<bos>", "n", "<0xC3>", "<0xA9>"]
    assert [tokenizer.token_bytes(index)[0] for index in ids] == [b"", b"n", b"\xc3", b"\xa9"]
    assert tokenizer.encode_special(f"<bos>n<eo{MARK}s>") == [256, *b"n<eos>"]


@pytest.mark.system
def test_the_tokenizer_does_not_import_jax() -> None:
    code = "import sys, jaxserve.tokenizer; sys.exit('jax' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
