"""Tokenizers to test with: small ones made on the spot, and published ones where JAXSERVE_TEST_DATA
has them.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxserve.tokenizer import Tokenizer, load_tokenizer

SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "the dog and the fox sat in the sun",
    "Hello, world! 123",
)
TEXTS = (
    "Hello, world!",
    " the fox\n\nand\tthe  dog ",
    "naïve café, cafe\u0301 and Ångström",  # composed and combining
    "日本語のテキスト。中文文本，한국어",
    "😀🦙 👩‍👩‍👧‍👦 👍🏽 🇩🇪",  # beyond the BMP, joined by ZWJ, modified, flags
    "नमस्ते שָׁלוֹם مرحبا",
    "a\x00b � \u200b\ufeff",
    "",
)
SMALL = (
    "sp-first-space",
    "sp-every-space",
    "sp-suffix-space",
    "json-byte-level",
    "json-byte-fallback",
)


@dataclass(frozen=True)
class Case:
    """A loaded tokenizer and what its library says: decode() of visible ids, encode() without
    special tokens.

    spoils_runs: the library turns a whole run of byte tokens into U+FFFD for one ill-formed byte in
    it.
    """

    tokenizer: Tokenizer
    special: dict[int, str]
    spoils_runs: bool
    library_encode: Callable[[str], list[int]]
    library_decode: Callable[[Sequence[int]], str]


def case_names() -> list[str]:
    """Names for build_case: files of the data folder by their path in it."""
    data = _data()
    if data is None:
        return list(SMALL)
    files = [*data.glob("tokenizers/*/*.model*"), *data.glob("tokenizers/*/tokenizer.json")]
    return [
        *SMALL,
        *sorted(
            str(file.relative_to(data)) for file in [*files, *data.glob("models/*/tokenizer.model")]
        ),
    ]


def build_case(name: str, folder: Path) -> Case:
    """Puts the tokenizer into folder, an empty one, and loads it."""
    if name in SMALL:
        write_small(name, folder)
    else:
        _copy_published(name, folder)
    return (
        _json_case(folder) if (folder / "tokenizer.json").exists() else _sentencepiece_case(folder)
    )


def write_small(name: str, folder: Path) -> None:
    """Writes one of SMALL as the tokenizer file of folder."""
    if name == "sp-first-space":
        train_sentencepiece(
            folder, remove_extra_whitespaces=False, normalization_rule_name="identity"
        )
    elif name == "sp-every-space":
        train_sentencepiece(folder)
    elif name == "sp-suffix-space":
        train_sentencepiece(folder, treat_whitespace_as_suffix=True)
    elif name == "json-byte-level":
        _byte_level().save(str(folder / "tokenizer.json"))
    elif name == "json-byte-fallback":
        _byte_fallback().save(str(folder / "tokenizer.json"))


def train_sentencepiece(folder: Path, **options: Any) -> None:
    """Trains a BPE model with byte fallback on SENTENCES and writes it as tokenizer.model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def append_special_tokens(file: Path, names: Sequence[str]) -> None:
    """Adds special tokens to a tokenizer.json, with the ids after its last added token."""
    content = json.loads(file.read_text(encoding="utf-8"))
    first = 1 + max(token["id"] for token in content["added_tokens"])
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": first + i, "content": n, "special": True, **off} for i, n in enumerate(names)
    ]
    file.write_text(json.dumps(content), encoding="utf-8")


def _byte_level() -> tokenizers.Tokenizer:
    """As GPT-2 and Llama 3: every byte has a letter; the post-processor adds BOS."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(
        ["<think>", "｜"]
    )  # not special: text, the second outside of the byte alphabet
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


def _byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 converted: visible spaces, byte tokens for what the vocabulary lacks, BOS and
    EOS."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz</>é日", "▁t", "▁th", "▁the", "▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    template = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=template
    )
    return tokenizer


def _data() -> Path | None:
    data = os.environ.get("JAXSERVE_TEST_DATA")
    return Path(data) if data else None


def _copy_published(name: str, folder: Path) -> None:
    data = _data()
    assert data is not None
    source = data / name
    shutil.copy(
        source, folder / ("tokenizer.json" if source.suffix == ".json" else "tokenizer.model")
    )
    settings = source.parent / "tokenizer_config.json"
    if settings.exists():
        shutil.copy(settings, folder)


def _json_case(folder: Path) -> Case:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {
        index: token.content
        for index, token in library.get_added_tokens_decoder().items()
        if token.special
    }
    return Case(
        tokenizer=load_tokenizer(folder),
        special=special,
        spoils_runs="ByteFallback" in str(library.decoder),
        library_encode=lambda text: library.encode(text, add_special_tokens=False).ids,
        library_decode=lambda ids: library.decode(list(ids), skip_special_tokens=True),
    )


def _sentencepiece_case(folder: Path) -> Case:
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(library.vocab_size())
    return Case(
        tokenizer=load_tokenizer(folder),
        special={index: library.id_to_piece(index) for index in ids if library.is_control(index)},
        spoils_runs=False,
        library_encode=library.encode,
        library_decode=lambda ids: library.decode(list(ids)),
    )
