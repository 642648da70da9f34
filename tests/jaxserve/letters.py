"""Golden models with a vocabulary of twenty ids, most of them letters.

An answer can report the log-probabilities of the whole vocabulary. One id inside has no token, the
last one is an end token, and the files name further tokens beyond the last id, as those of
published models do.
"""

import json
import shutil
from pathlib import Path

import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxserve.sampling_params import MAX_LOGPROBS

GOLDEN = Path(__file__).parents[1] / "golden"
LETTERS = '{}":,[]-01234abcdef'
HOLE = LETTERS.index("3")  # has no token
END = len(LETTERS)
VOCAB = END + 1
IMAGE = VOCAB
EOT = VOCAB + 3
assert VOCAB == MAX_LOGPROBS


def with_letters(case: str, folder: Path, missing: bool = True) -> Path:
    """Copy a golden checkpoint, cut to the first ids, with a tokenizer for them.

    missing: the files name tokens beyond the last id.
    """
    shutil.copytree(GOLDEN / case, folder, ignore=shutil.ignore_patterns("golden.npz"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"vocab_size": VOCAB, "eos_token_id": END})
    )
    tensors = load_file(folder / "model.safetensors")
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = tensors[name][:VOCAB].copy()
    save_file(tensors, folder / "model.safetensors")
    beyond = {"<image>": IMAGE, "<|eot|>": EOT} if missing else {}
    _tokenizer(beyond).save(str(folder / "tokenizer.json"))
    if missing:
        ends = {"eos_token_id": [END, EOT]}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


def _tokenizer(beyond: dict[str, int]) -> tokenizers.Tokenizer:
    letters = {letter: i for i, letter in enumerate(LETTERS) if i != HOLE}
    vocabulary = letters | {"<end>": END} | beyond
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="{"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<end>", *beyond)])
    return tokenizer
