"""Tokenizers whose files have tokens that the model does not have.

Right is what the library says of files without these tokens. Origins of the kind: an image token
that a text model has no row for (huggingface/transformers#37011, mlc-ai/xgrammar#237), a mask
token behind the last id (huggingface/transformers#3108), ids of a model that its tokenizer has no
token for (mlc-ai/mlc-llm#2651).
"""

import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxserve.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from jaxserve.tokenizer.loading import read_tokenizer_json
from jaxserve.tokenizer.tokenizer_json import complete_json
from tests.tokenizer_cases import train_sentencepiece

LETTERS = string.ascii_lowercase + string.punctuation
TEXTS = ("a", "say <|end|> or <extra>, <|end|><extra>", "<|en<|end|>d|>", "")
SPECIAL = AddedToken("<|end|>", special=True)
PLAIN = AddedToken("<extra>", special=False)


def word_level() -> tokenizers.Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="^"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def bpe() -> tokenizers.Tokenizer:
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|", "|>"]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("<", "|"), ("|", ">")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("<|", -3.0), *((letter, -4.0) for letter in LETTERS)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


JSON = {"word level": word_level, "bpe": bpe, "unigram": unigram}
KINDS = (*JSON, "sentencepiece")


def write(kind: str, folder: Path, added: Sequence[AddedToken]) -> int:
    """Write a tokenizer with tokens behind its last id; return how many ids it has without them."""
    folder.mkdir()
    if kind == "sentencepiece":
        return _write_sentencepiece(folder, added)
    tokenizer = JSON[kind]()
    size = tokenizer.get_vocab_size()
    for token in added:
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    return size


def _write_sentencepiece(folder: Path, added: Sequence[AddedToken]) -> int:
    train_sentencepiece(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    size = model.vocab_size()
    declared = {
        str(size + i): {"content": token.content, "special": token.special}
        for i, token in enumerate(added)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    return size


def ids_of_library(folder: Path) -> Callable[[str], list[int]]:
    """Return what encodes a text, with names of special tokens in it as text."""
    if (folder / "tokenizer.model").exists():
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return lambda text: [model.bos_id(), *model.encode(text)]
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    return lambda text: library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("order", [(SPECIAL, PLAIN), (PLAIN, SPECIAL)], ids=["special", "plain"])
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_as_if_the_files_did_not_name_them(
    kind: str, kept: int, order: tuple[AddedToken, AddedToken], tmp_path: Path
) -> None:
    """The model ends before the first of two tokens, before or behind the second, or later."""
    size = write(kind, tmp_path / "all", order)
    write(kind, tmp_path / "fewer", order[:kept])
    found = load_tokenizer(tmp_path / "all", size + kept)
    expected = load_tokenizer(tmp_path / "fewer")
    beyond = {token.content: size + i for i, token in enumerate(order) if i >= kept}
    assert found.missing_tokens == beyond
    assert all(found.token_id(name) is None for name in beyond)
    check_equal(found, expected)
    if kind != "sentencepiece" or not kept:
        encode = ids_of_library(tmp_path / "fewer")
        assert [found.encode(text) for text in TEXTS] == [encode(text) for text in TEXTS]


def check_equal(found: Tokenizer, expected: Tokenizer) -> None:
    assert found.vocab_size == expected.vocab_size
    assert found.special_tokens == expected.special_tokens
    assert found.added_tokens == expected.added_tokens
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.encode_inner(text) == expected.encode_inner(text)
    for token in range(-1, expected.vocab_size + 3):
        assert found.token_text(token) == expected.token_text(token)
        assert found.token_bytes(token) == expected.token_bytes(token)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_the_model_cannot_read_is_refused(kind: str, tmp_path: Path) -> None:
    size = write(kind, tmp_path / "all", ())
    load_tokenizer(tmp_path / "all", size)
    refused = (
        f"its token '.*' has the id {size - 1}, the model's vocabulary the ids 0 to {size - 2}"
    )
    with pytest.raises(TokenizerError, match=f"{refused}, .*not of one checkpoint"):
        load_tokenizer(tmp_path / "all", size - 1)


def with_holes(folder: Path) -> int:
    """Write a tokenizer with tokens at N, N + 2 (plain) and N + 6; return N."""
    size = len(LETTERS)
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    vocabulary |= {"<|a|>": size, "<b>": size + 2, "<|c|>": size + 6}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="^"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in ("<|a|>", "<|c|>")])
    tokenizer.add_tokens([AddedToken("<b>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return size


@pytest.mark.parametrize("more", range(9))
def test_a_model_that_ends_in_a_hole_or_before_it(more: int, tmp_path: Path) -> None:
    size = with_holes(tmp_path)
    places = {"<|a|>": 0, "<b>": 2, "<|c|>": 6}
    found = load_tokenizer(tmp_path, size + more)
    has = [name for name, place in places.items() if place < more]
    assert set(found.missing_tokens) == places.keys() - has
    last = max((places[name] for name in has), default=-1)
    assert found.vocab_size == size + last + 1 <= size + more
    for hole in {1, 3, 4, 5, *range(last + 1, 9)}:
        assert found.token_bytes(size + hole) == (b"", False)
        assert found.token_text(size + hole) == f"<id {size + hole}>"
    text = [LETTERS.index(letter) for letter in "<b>"]
    assert found.encode("<b>") == ([size + 2] if more > 2 else text)
    assert found.encode("<|c|>") == [LETTERS.index(letter) for letter in "<|c|>"]


def test_a_piece_for_a_missing_token(tmp_path: Path) -> None:
    """Converters put image tokens into the SentencePiece model itself."""
    folder = tmp_path / "pieces"
    size = write("sentencepiece", folder, ())
    file = folder / "tokenizer.model"
    text, control = ids_of_library(folder), 3
    image = b"\x0a\x07<image>" + b"\x15\0\0\0\0" + b"\x18" + bytes([control])
    file.write_bytes(file.read_bytes() + b"\x0a" + bytes([len(image)]) + image)
    assert load_tokenizer(folder).special_tokens["<image>"] == size
    assert load_tokenizer(folder, size + 1).special_tokens["<image>"] == size
    found = load_tokenizer(folder, size)
    assert (found.missing_tokens, found.vocab_size) == ({"<image>": size}, size)
    assert [found.encode(t) for t in TEXTS] == [text(t) for t in TEXTS]
    refused = "the chat template's prompt has '<image>', which is token 330, but .* 0 to 329"
    with pytest.raises(TokenizerError, match=refused):
        found.encode_special("a<image>")


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_writes_a_missing_token(kind: str, tmp_path: Path) -> None:
    size = write(kind, tmp_path / "all", (SPECIAL, PLAIN))
    found = load_tokenizer(tmp_path / "all", size + 1)
    assert size in found.encode_special("say <|end|>")
    refused = (
        f"prompt has '<extra>', which is token {size + 1}, but the model's ids are 0 to {size}; "
    )
    with pytest.raises(TokenizerError, match=f"{refused}.* give another template"):
        found.encode_special("<|end|> <extra>")


def test_a_missing_word_is_a_word(tmp_path: Path) -> None:
    """It may stand in any conversation, and no template writes it as a mark."""
    size = write("word level", tmp_path / "all", (AddedToken("image", special=False),))
    found = load_tokenizer(tmp_path / "all", size)
    assert found.encode_special("image") == [LETTERS.index(letter) for letter in "image"]


@pytest.mark.parametrize(
    ("settings", "ends", "refused"),
    [
        ({"eos_token": "<|end|>"}, (), None),
        ({"bos_token": "<|end|>", "add_bos_token": False}, (), None),
        ({"bos_token": "<|end|>", "add_bos_token": True}, (), "add_bos_token"),
        ({"eos_token": "<|end|>", "add_eos_token": True}, (), "add_eos_token"),
        ({"eos_token": "|"}, (LETTERS.index("|"),), None),
    ],
)
def test_begin_and_end_tokens_that_are_missing(
    settings: dict[str, object], ends: tuple[int, ...], refused: str | None, tmp_path: Path
) -> None:
    size = write("word level", tmp_path / "all", (SPECIAL,))
    (tmp_path / "all" / "tokenizer_config.json").write_text(json.dumps(settings))
    if refused:
        with pytest.raises(
            TokenizerError, match=f"would be added to every text.* correct {refused}"
        ):
            load_tokenizer(tmp_path / "all", size)
        return
    found = load_tokenizer(tmp_path / "all", size)
    assert (found.bos_id, found.eos_ids) == (None, ends)
    assert found.encode("ab") == [0, 1]


def test_a_post_processor_that_adds_a_missing_token(tmp_path: Path) -> None:
    tokenizer = word_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", size)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="would be added to every text"):
        load_tokenizer(tmp_path, size)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert load_tokenizer(tmp_path, size).encode("a") == [0]


NEEDED = "has the id 1, the model's vocabulary the ids 0 to 0, and not every text can be spelled"


def test_unknown_text_that_is_a_missing_token(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "<unk>": 1}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=f"'<unk>' {NEEDED}"):
        load_tokenizer(tmp_path, 1)


def test_bytes_need_no_token_for_unknown_text(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<unk>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.add_tokens([AddedToken("    ")])  # as GPT-NeoX has them
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path, 256)
    text = "héllo <unk>     x"
    assert found.decode(found.encode(text)) == text
    assert found.decode(found.encode_special("héllo     x")) == "héllo     x"


@pytest.mark.parametrize("unknown", [None, "a"])
def test_a_letter_that_only_a_missing_token_spells(unknown: str | None, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, [], unk_token=unknown))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken("\n")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=NEEDED):
        load_tokenizer(tmp_path, 1)
    assert load_tokenizer(tmp_path, 2).encode("a\na") == [0, 1, 0]


def test_kept_tokens_keep_their_ids(tmp_path: Path) -> None:
    """The library gives a new token the number of those before it."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<image>": 90}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="^"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>", "<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = len(LETTERS) + 1
    found = load_tokenizer(tmp_path, end + 1)
    assert (found.special_tokens, found.missing_tokens) == ({"<|end|>": end}, {"<image>": 90})
    assert found.encode_special("a<|end|>") == [0, end]
    file = read_tokenizer_json(tmp_path)
    assert file
    given = complete_json(file, end + 1)
    assert tokenizers.Tokenizer.from_str(given).encode("<|end|>").ids == [end]


def test_a_missing_piece_keeps_its_part_in_how_text_is_split(tmp_path: Path) -> None:
    """Unigram scores unknown text by the worst piece of all."""
    pieces = [("<unk>", 0.0), *((letter, -30.0) for letter in "abc"), ("<image>", -100.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "éabc"
    found = load_tokenizer(tmp_path, 4)
    assert found.encode(text) == tokenizer.encode(text).ids == [0, 1, 2, 3]
    with pytest.raises(TokenizerError, match="holds '<image>', which this tokenizer cannot spell"):
        found.encode("<image>")


@pytest.mark.parametrize("kind", JSON)
def test_the_file_that_clients_get_has_ids_of_the_model(kind: str, tmp_path: Path) -> None:
    size = write(kind, tmp_path / "all", (SPECIAL, PLAIN))
    file = read_tokenizer_json(tmp_path / "all")
    assert file
    assert complete_json(file, size + 2) == file.text
    library = tokenizers.Tokenizer.from_str(complete_json(file, size + 1))
    assert max(library.get_vocab().values()) == size
    assert library.encode("<|end|>").ids == [size]
