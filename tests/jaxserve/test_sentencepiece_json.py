"""SentencePiece models as tokenizer.json: ids equal SentencePiece's for all space rules."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from jaxserve.tokenizer import TokenizerError, load_tokenizer
from jaxserve.tokenizer.sentencepiece_json import tokenizer_json
from tests.tokenizer_cases import SENTENCES, TEXTS, train_sentencepiece

PLAIN: dict[str, Any] = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
TURN = "<s>the fox and the dog</s>the sun"  # special tokens as a chat template writes them


def train(folder: Path, **options: Any) -> None:
    """Train a model without user-defined symbols, as Llama 2 has it."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        **PLAIN | {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True} | options,
    )


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    pieces = [*"".join(SENTENCES), *"  \n\téß日😀▁", "<tool>", "<tool>", " the", "fox"]
    return ["".join(draw.choices(pieces, k=draw.randrange(1, 40))) for _ in range(count)]


def both(folder: Path, **settings: object) -> tuple[Any, tokenizers.Tokenizer]:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder), tokenizers.Tokenizer.from_str(tokenizer_json(folder))


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("space_first", [True, False])
def test_ids_and_text(tmp_path: Path, space_first: bool, legacy: bool) -> None:
    train(tmp_path, add_dummy_prefix=space_first)
    ours, theirs = both(tmp_path, legacy=legacy, add_eos_token=True)
    for text in [*TEXTS, *random_texts(300)]:
        if space_first and text.startswith((" ", "▁")) and not legacy:
            continue  # the one exception
        assert theirs.encode(text).ids == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert theirs.encode(TURN, add_special_tokens=False).ids == ours.encode_special(TURN)


def test_symbols_of_the_model(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, add_dummy_prefix=False, **PLAIN)
    ours, theirs = both(tmp_path)
    for text in [*TEXTS, *random_texts(300), "<tool>", "<tool> the<tool>"]:
        assert theirs.encode(text).ids == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    train_sentencepiece(tmp_path, **PLAIN)
    with pytest.raises(TokenizerError, match="begin with its symbols"):
        tokenizer_json(tmp_path)


def test_without_bytes(tmp_path: Path) -> None:
    """Letters that the vocabulary lacks are unknown; several in a row are one token."""
    train(tmp_path, vocab_size=60, byte_fallback=False)
    ours, theirs = both(tmp_path, legacy=True, add_bos_token=False)
    for text in ("the fox", "日本 the", "a日b", "日"):
        assert theirs.encode(text).ids == ours.encode(text)


@pytest.mark.parametrize("options", [{}, {**PLAIN, "treat_whitespace_as_suffix": True}])
def test_models_that_rewrite_their_text(tmp_path: Path, options: dict[str, Any]) -> None:
    train_sentencepiece(tmp_path, **options)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json \(add one\)"):
        tokenizer_json(tmp_path)


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    train(tmp_path, model_type="unigram", vocab_size=38, byte_fallback=False)
    with pytest.raises(TokenizerError, match="no BPE model"):
        tokenizer_json(tmp_path)
