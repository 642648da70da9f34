"""Text that a grammar forces comes out byte for byte, whatever the tokenizer makes of it.

Right is the grammar's own text. Origins of the kind: forced text that a tokenizer normalizes
(guidance-ai/llguidance#366), and two letters of which the second was never allowed
(guidance-ai/llguidance#268).
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxserve.errors import GrammarError
from jaxserve.structure import Grammar, Structure
from jaxserve.structure.grammars import Grammars
from jaxserve.structure.spelling import RecentSpellings, Speller
from jaxserve.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from tests.slow_cases import slow_but
from tests.tokenizer_cases import train_sentencepiece

pytestmark = pytest.mark.system
TEXTS = (
    "a>",
    "cafe\u0301.txt",  # a file name as macOS writes it
    "caf\u00e9.txt",
    "  Two  spaces ",
    "\ufb01x \u212b\uff21 \u2460",  # a ligature, signs and wide letters that NFKC rewrites
    "\uac00 \u1112\u1161\u11ab",  # Hangul, composed and as single letters
    "a\u0315\u0300\u0344",  # marks out of order
    "Stra\u00dfe \u0130\u0131 \u03a3\u03c2",  # letters whose lower case differs
    "\u200bzero\u00adwidth\u2003\t\n",
    "\u2047 <unk> x",  # what SentencePiece decodes unknown pieces to
)
NORMALIZERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "NFC": normalizers.NFC,
    "NFD": normalizers.NFD,
    "NFKC": normalizers.NFKC,
    "NFKD": normalizers.NFKD,
    "Nmt": normalizers.Nmt,
    "Lowercase": normalizers.Lowercase,
    "StripAccents": normalizers.StripAccents,
    "Strip": normalizers.Strip,
    "Prepend": lambda: normalizers.Prepend("_"),
    "Replace": lambda: normalizers.Replace("f", "g"),
    "Bert": normalizers.BertNormalizer,
    "Sequence": lambda: normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
}
RULES = ("identity", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")
CASES = (*NORMALIZERS, "Precompiled", "ByteLevel", *RULES)
WAYS = [(name, way) for name in CASES for way in ("forced", "drawn")]
QUICK = (  # letters composed, taken apart, rewritten, dropped and added, in each library
    *(("none", "drawn"), ("NFC", "forced"), ("NFKD", "drawn"), ("Lowercase", "forced")),
    *(("Strip", "drawn"), ("Prepend", "forced"), ("Bert", "forced"), ("Sequence", "drawn")),
    *(("Precompiled", "forced"), ("ByteLevel", "drawn"), ("identity", "forced")),
    *(("nmt_nfkc", "drawn"), ("nfkc_cf", "forced")),
)


def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    """Return a tokenizer that spells any bytes and normalizes in one of the libraries' ways."""
    if name in RULES:
        train_sentencepiece(folder, normalization_rule_name=name)
        return load_tokenizer(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ca", "fe", "cafe", ".t", ".tx"]
    merges = [("c", "a"), ("f", "e"), ("ca", "fe"), (".", "t"), (".t", "x")]
    vocabulary = {token: i for i, token in enumerate([*letters, *merged])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    if name == "ByteLevel":
        library.normalizer = normalizers.ByteLevel()
    else:
        library.normalizer = _precompiled(folder) if name == "Precompiled" else NORMALIZERS[name]()
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return load_tokenizer(folder)


def _precompiled(folder: Path) -> normalizers.Precompiled:
    """Return the rules of a SentencePiece model as the tokenizers library takes them over."""
    train_sentencepiece(folder, normalization_rule_name="nmt_nfkc")
    model = (folder / "tokenizer.model").read_bytes()
    rules = sentencepiece_model_pb2.ModelProto.FromString(model).normalizer_spec
    return normalizers.Precompiled(rules.precompiled_charsmap)


@contextmanager
def grammars_of(tokenizer: Tokenizer, eos_ids: tuple[int, ...] = ()) -> Iterator[Grammars]:
    compiler = Grammars(tokenizer, eos_ids or tokenizer.eos_ids, tokenizer.vocab_size)
    try:
        yield compiler
    finally:
        compiler.close()


def walk(grammar: Grammar, tokenizer: Tokenizer, forced: bool, rng: random.Random) -> str:
    """Return a text that follows the grammar; free tokens are drawn, others forced if so asked."""
    ids = walked(grammar, tokenizer, forced, rng)
    return b"".join(tokenizer.token_bytes(token)[0] for token in ids).decode()


def walked(grammar: Grammar, tokenizer: Tokenizer, forced: bool, rng: random.Random) -> list[int]:
    matcher = grammar.matcher()
    ids = list[int]()
    while not matcher.ended:
        tokens = matcher.forced() if forced else []
        if not tokens:
            mask = np.frombuffer(matcher.masks()[0], np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            assert allowed, matcher.failure
            tokens = [rng.choice(allowed)]
        if tokens[0] in tokenizer.eos_ids:
            break
        for token in tokens:
            assert matcher.accept(token), matcher.failure
        ids += tokens
    return ids


@pytest.mark.parametrize("way", slow_but(WAYS, QUICK))
def test_every_text_with_every_normalizer(way: tuple[str, str], tmp_path: Path) -> None:
    name, forced = way[0], way[1] == "forced"
    tokenizer = tokenizer_of(name, tmp_path)
    rng = random.Random(0)
    with grammars_of(tokenizer) as compiler:
        for text in TEXTS:
            for kind, value, expected in structures(text):
                grammar = compiler.compile(Structure.of(kind, value))
                found = walk(grammar, tokenizer, forced, rng)
                assert expected(found), (kind, text, found)
        several = compiler.compile(Structure.of("choice", list(TEXTS)))
        assert {walk(several, tokenizer, forced, rng) for _ in range(120)} == set(TEXTS)


def structures(text: str) -> Iterator[tuple[str, Any, Callable[[str], bool]]]:
    """Yield structures that allow this text alone, and what is true of an answer."""
    yield "choice", [text], lambda found: found == text
    yield "json_schema", {"const": text}, lambda found: json.loads(found) == text
    yield "json_schema", {"enum": [text]}, lambda found: json.loads(found) == text
    named = {
        "type": "object",
        "properties": {text: {"const": 1}},
        "required": [text],
        "additionalProperties": False,
    }
    yield "json_schema", named, lambda found: json.loads(found) == {text: 1}
    literal = text.replace(".", "[.]")
    yield "regex", literal, lambda found: found == text
    yield "lark", f"start: {json.dumps(text, ensure_ascii=False)}", lambda found: found == text


@pytest.mark.parametrize("name", slow_but(CASES, [name for name, _ in QUICK]))
def test_stop_strings_are_those_of_the_text_itself(name: str, tmp_path: Path) -> None:
    """Not those that a normalizer would make equal to it; the text comes in pieces."""
    tokenizer = tokenizer_of(name, tmp_path)
    rng = random.Random(0)
    composed, decomposed = "\u00e9.", "e\u0301."
    with grammars_of(tokenizer) as compiler:
        for text in (f"caf{composed}txt", f"caf{decomposed}txt"):
            grammar = compiler.compile(Structure.of("choice", [text]))
            ids = walked(grammar, tokenizer, True, rng)
            for stop in (composed, decomposed):
                stream = StreamDecoder(tokenizer, (), [stop])
                found = "".join(stream.push([token]) for token in ids)
                if stop not in text:
                    assert found + stream.finish() == text
                    continue
                assert (found, stream.stopped) == ("caf", stop)


def test_a_text_without_tokens_is_refused_in_words(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    library.decoder = decoders.Fuse()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with grammars_of(tokenizer) as compiler:
        refused = "^regex cannot be used: no text can follow, or no tokens of the model spell it$"
        with pytest.raises(GrammarError, match=refused):
            compiler.compile(Structure.of("regex", "abz"))
        matcher = compiler.compile(Structure.of("regex", "(a|b)z")).matcher()
        assert matcher.accept(0) and not any(matcher.masks()[0])
        assert matcher.failure == "no text can follow, or no tokens of the model spell it"


@pytest.mark.parametrize("regex", ["cabd", "c(ab|ba)d", "[cd]abd"])
def test_an_end_token_with_a_text_ends_no_unfinished_text(regex: str, tmp_path: Path) -> None:
    """The tokenizer spells "ab" by the end token; the letters spell it, too."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "<|end|>": 5}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["<|end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("cabd") == [2, 4, 3]
    rng = random.Random(0)
    with grammars_of(tokenizer, (5, 4)) as compiler:
        grammar = compiler.compile(Structure.of("regex", regex))
        for forced in (True, False):
            assert walk(grammar, tokenizer, forced, rng) in ("cabd", "dabd", "cbad")


def test_the_fewest_tokens_of_a_text() -> None:
    speller = Speller([b"", b"a", b"ab", b"bc", b"c", b"abcd", b"d"])
    assert speller.spell(b"abc") == [2, 4], "the longest first, where two ways are as short"
    assert speller.spell(b"abcdbc") == [5, 3]
    assert speller.spell(b"") == []
    assert speller.spell(b"abx") == [], "no token for x"
    assert Speller([b"a", b"ab", b"bc", b"b"]).spell(b"abc") == [0, 2], "not the longest first"
    assert Speller([b"a", b"a", b"a"], {2}).spell(b"aa") == [1, 1]


def test_spelled_wherever_any_tokens_do() -> None:
    rng = random.Random(3)
    for _ in range(300):
        texts = sorted({bytes(rng.choices(b"abc", k=rng.randint(1, 3))) for _ in range(5)})
        speller = Speller(texts)
        text = bytes(rng.choices(b"abc", k=7))
        fewest = shortest(texts, text)
        ids = speller.spell(text)
        assert len(ids) == (fewest or 0)
        assert not ids or b"".join(texts[token] for token in ids) == text
        assert speller.mend([rng.randrange(len(texts)) for _ in range(5)], text) or not ids


def shortest(texts: list[bytes], text: bytes) -> int | None:
    """Return the number of the fewest texts that join to a text, by trying all of them."""
    if not text:
        return 0
    rest = [shortest(texts, text[len(t) :]) for t in texts if text.startswith(t)]
    return min((1 + count for count in rest if count is not None), default=None)


def test_the_tokenizers_own_ids_stay_around_what_differs() -> None:
    texts = [b"the ", b"fox ", b"\xc3\xa9", b"e", b"\xcc", b"\x81", b"t", b"h", b" ", b"dog"]
    ids = [0, 2, 8, 9]  # an encoder composed the letter
    assert Speller(texts).mend(ids, b"the e\xcc\x81 dog") == [0, 3, 4, 5, 8, 9]
    assert Speller(texts).mend([0, 9], b"the dog ") == [0, 9, 8], "a space at the end is dropped"
    assert Speller(texts).mend([8, 0, 9], b"the dog") == [0, 9], "a space too many"
    assert Speller(texts).mend([], b"the") == [6, 7, 3]


def test_the_rest_of_a_long_text_is_remembered() -> None:
    texts = [b"ab", b"c"]
    recent = RecentSpellings(texts)
    ids = [0, 1] * 200
    recent.add(b"abc" * 200, ids)
    assert recent.find(b"c" + b"abc" * 100) == [1, *[0, 1] * 100]
    assert recent.find(b"bc" + b"abc" * 100) is None, "inside a token"
    assert recent.find(b"abd" * 200) is None
    recent.add(b"ab", [0])
    assert recent.find(b"ab") is None, "short texts are spelled anew"
    for i in range(20):
        recent.add(bytes([i]) * 300, [1] * 300)
    assert recent.find(b"abc" * 200) is None, "the oldest is forgotten"


@pytest.mark.parametrize("name", ["none", "identity"])
def test_forced_text_is_spelled_by_the_tokenizer_where_it_can(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name, tmp_path)
    text = "cafe and the fox"
    with grammars_of(tokenizer) as compiler:
        matcher = compiler.compile(Structure.of("regex", f"{text}[.]")).matcher()
        forced = matcher.forced()
        whole = tokenizer.encode_inner(f"{text}.")
        assert forced == whole[: len(forced)] and len(forced) > len(whole) - 3


def test_a_letter_as_bytes_leaves_the_others_alone(tmp_path: Path) -> None:
    """Byte tokens come first in such vocabularies, and models seldom see them."""
    tokenizer = tokenizer_of("nfkc", tmp_path)
    with grammars_of(tokenizer) as compiler:
        matcher = compiler.compile(Structure.of("regex", "the e\u0301 fox[.]")).matcher()
        forced = matcher.forced()
    beginning = tokenizer.encode_inner("the")
    assert forced[: len(beginning)] == beginning
    spelled = [tokenizer.token_text(token) for token in forced]
    assert sum(len(tokenizer.token_bytes(token)[0]) == 1 for token in forced) <= 6, spelled
