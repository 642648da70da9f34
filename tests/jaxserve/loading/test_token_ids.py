"""End tokens of three files, some of which the model does not have."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxserve.errors import ModelError
from jaxserve.loading.spec import open_checkpoint
from jaxserve.loading.token_ids import TokenIds, read_token_ids

GOLDEN = Path(__file__).parents[2] / "golden" / "llama_gqa"
V = 10
BEYOND = {"<|eot|>": V, "<|eom|>": V + 5}


def read(
    folder: Path, generation: object = None, config: object = None, tokenizer: str | None = None
) -> TokenIds:
    """Read the tokens of a folder whose files name these end tokens; None: the file names none."""
    shutil.copy(GOLDEN / "model.safetensors", folder)
    _write(folder / "config.json", eos_token_id=config)
    _write(folder / "generation_config.json", eos_token_id=generation)
    _write(folder / "tokenizer_config.json", eos_token=tokenizer)
    vocabulary = {f"w{i}": i for i in range(V - 1)} | {"<|end|>": V - 1} | BEYOND
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(n, special=True) for n in ("<|end|>", *BEYOND)])
    library.save(str(folder / "tokenizer.json"))
    return read_token_ids(folder, open_checkpoint(folder), V)


def _write(file: Path, **fields: object) -> None:
    file.write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )


@pytest.mark.parametrize(
    ("given", "ends", "absent"),
    [
        ({}, (), []),
        ({"generation": 3}, (3,), []),
        ({"generation": [3, V - 1]}, (3, V - 1), []),
        ({"generation": 0, "config": 1, "tokenizer": "w2"}, (0, 2), []),
        ({"generation": [0, 2], "tokenizer": "w2"}, (0, 2), []),
        ({"config": [1], "tokenizer": "w2"}, (1, 2), []),
        ({"generation": [], "tokenizer": "w2"}, (), []),
        ({"tokenizer": "<|end|>"}, (V - 1,), []),
        ({"generation": [V, 3, V + 5]}, (3,), [V, V + 5]),
        ({"generation": V, "config": 1}, (1,), [V]),
        ({"generation": [], "config": 1}, (), []),
        ({"generation": [V + 1, 2]}, (2,), [V + 1]),
        ({"generation": 99, "config": [1, 98]}, (1,), [98, 99]),
        ({"generation": V, "config": [V + 5], "tokenizer": "w2"}, (2,), [V, V + 5]),
        ({"generation": 1, "config": V}, (1,), []),
        ({"generation": 1, "config": "<|end|>"}, (1,), []),
        ({"generation": V, "tokenizer": "<|eom|>"}, (), [V]),
        ({"tokenizer": "<|eom|>"}, (), []),
    ],
)
def test_the_first_file_that_names_one_which_the_model_has_and_the_tokenizer(
    given: dict[str, Any], ends: tuple[int, ...], absent: list[int], tmp_path: Path
) -> None:
    tokens = read(tmp_path, **given)
    assert tokens.eos_ids == ends
    missing, *others = (note for note in tokens.notes if "config.json" not in note)
    assert missing == (
        "the tokenizer's files have '<|eot|>' (10), '<|eom|>' (15), but the model's ids are 0 to "
        "9: such names are text"
    )
    kept = f"answers end with {list(ends)}" if ends else "no token ends an answer"
    if absent:
        assert others == [f"the model does not have the end tokens {absent}: {kept}"]
    else:
        assert others == ([] if ends else [kept])


@pytest.mark.parametrize("names", [(), ("<|message|>",)])
def test_marks_of_harmony_end_an_answer_whatever_the_files_say(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    special = ("<|channel|>", "<|return|>", "<|call|>", *names)
    library = tokenizers.Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(("w0", *special))}, unk_token="w0")
    )
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(name, special=True) for name in special])
    read(tmp_path, generation=0)
    library.save(str(tmp_path / "tokenizer.json"))
    found = read_token_ids(tmp_path, open_checkpoint(tmp_path), V)
    assert found.eos_ids == ((0, 3, 2) if names else (0,))


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({"generation": 3, "tokenizer": "w3"}, []),
        ({"tokenizer": "w3"}, []),
        (
            {"generation": 3, "tokenizer": "<|end|>"},
            [
                "answers end with 'w3' (3), as generation_config.json says, and with '<|end|>' "
                "(9), the tokenizer's end token"
            ],
        ),
        (
            {"config": [1, 4], "tokenizer": "w2"},
            [
                "answers end with 'w1' (1), 'w4' (4), as config.json says, and with 'w2' (2), the "
                "tokenizer's end token"
            ],
        ),
        (
            {"generation": 3, "config": [3, 5]},
            [
                "'w5' (5) of config.json ends no answer, since generation_config.json does not "
                "name it"
            ],
        ),
        ({"generation": [3, 5], "config": 5}, []),
        (
            {"generation": [], "config": 2, "tokenizer": "w2"},
            ["no token ends an answer, as generation_config.json says, and not 'w2' (2)"],
        ),
        ({"generation": []}, ["no token ends an answer, as generation_config.json says"]),
    ],
)
def test_sources_that_disagree_are_said(
    given: dict[str, Any], notes: list[str], tmp_path: Path
) -> None:
    # Blaizzy/mlx-vlm#2112: with <|endoftext|> of generation_config.json alone answers went on
    # beyond <|im_end|>, the tokenizer's; QwenLM/Qwen3#927: published files that disagree.
    found = read(tmp_path, **given).notes
    assert [note for note in found if "config.json" in note] == notes


@pytest.mark.parametrize("ids", [[1, -1], -1, True, "2", 1.0, [[1]], list(range(17)), {}])
@pytest.mark.parametrize("source", ["generation", "config"])
def test_what_is_no_token_of_any_file(source: str, ids: object, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"eos_token_id .*at most 16 ids of the vocabulary \(0 to 9"
    ):
        read(tmp_path, **{source: ids})
