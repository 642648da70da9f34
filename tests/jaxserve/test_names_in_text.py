"""Names of tokens in text that a template wrote: where the tokenizers library itself finds them."""

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxserve.tokenizer import TokenizerError, load_tokenizer
from jaxserve.tokenizer.special import NamedToken, NameSplitter, any_of

NAMES = ("<x>", "<x>y", "a<x", "  ", "   ", "tool", "b b", "END", "<|im|>", "é>", "AB")
PIECES = (
    *NAMES,
    *"abyz<>|",
    " ",
    "  ",
    "\n",
    "\t",
    "\x1c",
    "\u0301",
    "\u200d",
    "_",
    "é",
    "Tool",
    "ab",
)
NORMALIZERS = (
    None,
    normalizers.NFC(),
    normalizers.Lowercase(),
    normalizers.Strip(),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
)


def library(normalizer: Any = None) -> tokenizers.Tokenizer:
    """A tokenizer of bytes, without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    return made


def random_tokens(draw: random.Random, normalizer: Any) -> list[AddedToken]:
    stripped = isinstance(normalizer, normalizers.Strip)
    return [
        AddedToken(
            name,
            special=draw.random() < 0.5,
            normalized=draw.random() < 0.5,
            lstrip=draw.random() < 0.2,
            rstrip=draw.random() < 0.2,
            single_word=draw.random() < 0.3,
        )
        for name in draw.sample(NAMES, k=4)
        if name.strip() or not stripped
    ]


@pytest.mark.parametrize("seed", range(4))
def test_names_are_found_where_the_library_finds_them(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for number in range(25):
        normalizer = NORMALIZERS[number % len(NORMALIZERS)]
        theirs = library(normalizer)
        tokens = random_tokens(draw, normalizer)
        theirs.add_tokens(tokens)
        theirs.save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        for _ in range(20):
            text = "".join(draw.choices(PIECES, k=draw.randrange(1, 12)))
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode_special(text) == ids, (text, tokens, normalizer)


def test_a_name_of_which_the_normalizer_leaves_nothing(tmp_path: Path) -> None:
    """The library panics at texts then (0.23.3)."""
    theirs = library(normalizers.Strip())
    theirs.add_tokens([AddedToken("  ", normalized=True)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="the normalizer leaves nothing of the added token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_the_pattern_finds_the_longest_name(seed: int) -> None:
    draw = random.Random(seed)
    names = {"".join(draw.choices("ab|", k=draw.randrange(1, 6))) for _ in range(40)}
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    for _ in range(300):
        text = "".join(draw.choices("ab|c", k=40))
        assert re.findall(any_of(names), text) == re.findall(longest_first, text)
    assert re.findall(any_of([]), "a") == []


def test_names_that_contain_each_other_without_end() -> None:
    names = ["a" * size for size in range(1, 800)]
    assert [len(found) for found in re.findall(any_of(names), "a" * 1000)] == [799, 201]


def cost(splitter: NameSplitter, text: str) -> float:
    started = time.thread_time()
    splitter.encode(text, lambda part, opening: [])
    return time.thread_time() - started


def test_no_text_takes_long() -> None:
    """Each of these took minutes to hours per megabyte."""
    names = [
        NamedToken(f"<|{letter}{number}|>", number) for number in range(999) for letter in "ab"
    ]
    swallowing = NamedToken("<|x|>", 0, left=True, right=True)
    assert cost(NameSplitter(names), "<|" * 500_000) < 60
    assert cost(NameSplitter([swallowing]), f"<|x|>a{' ' * 1_000_000}b<|x|>") < 60


@pytest.mark.parametrize("text", ["<tool>a", "<TOOL>a"])
def test_normalized_names_take_no_time_that_grows_with_the_square(
    text: str, tmp_path: Path
) -> None:
    theirs = library(normalizers.Lowercase())
    theirs.add_tokens([AddedToken("<tool>", normalized=True)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    started = time.thread_time()
    assert len(tokenizer.encode_special(text * 150_000)) == 300_000
    assert time.thread_time() - started < 60
