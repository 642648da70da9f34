"""A tiny embedding model as it is published, and what transformers says of two prompts."""

import shutil
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, processors

FOLDER = Path(__file__).parent / "golden" / "qwen3_embedding"
BOUND = 1e-5
WORDS, END = 94, 94  # "w0" to "w93", and the token that ends a text
IDS = 96  # of the model


def golden() -> tuple[list[list[int]], np.ndarray]:
    """Prompts as token ids, and their embeddings [B, D]."""
    answer = np.load(FOLDER / "golden.npz")
    prompts = [
        row[:length].tolist()
        for row, length in zip(answer["prompts"], answer["lengths"], strict=False)
    ]
    return prompts, answer["embeddings"]


def with_tokenizer(folder: Path) -> Path:
    """The checkpoint in `folder`, beside a tokenizer of words whose post-processor puts END behind
    a text.

    The model's last id has no token, and the tokenizer has one behind it.
    """
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<end>": END, "<image>": IDS}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, special=True) for name in ("<end>", "<image>")]
    )
    template = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def text_of(ids: list[int]) -> str:
    """The text that the tokenizer makes these words of."""
    return " ".join(f"w{i}" for i in ids)
