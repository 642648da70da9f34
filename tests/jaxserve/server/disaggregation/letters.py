"""Golden models with a vocabulary of twenty letters.

An answer can report the log-probabilities of the whole vocabulary.
"""

import json
import shutil
from pathlib import Path

import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.request import MAX_LOGPROBS

GOLDEN = Path(__file__).parents[3] / "golden"
LETTERS = '{}":,[]-01234abcdef'
END = len(LETTERS)
VOCAB = END + 1
assert VOCAB == MAX_LOGPROBS


def with_letters(case: str, folder: Path) -> Path:
    """Copy a golden checkpoint, cut to the first tokens, with a tokenizer for them."""
    shutil.copytree(GOLDEN / case, folder, ignore=shutil.ignore_patterns("golden.npz"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"vocab_size": VOCAB, "eos_token_id": END})
    )
    tensors = load_file(folder / "model.safetensors")
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = tensors[name][:VOCAB].copy()
    save_file(tensors, folder / "model.safetensors")
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="{")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
