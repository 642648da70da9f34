"""Writes declared_tokens.json: texts as token ids by transformers, in folders that declare tokens in
every way that its files have, alone and in pairs.

    python tests/golden/make_declared_tokens.py

Needs transformers (5.23.0 made the committed file), sentencepiece and jinja2; not part of the tests'
environment.

`bases`: tokenizer files (tokenizer.model in base64) with fields of tokenizer_config.json. `messages`:
a conversation. `cases`:
for a base and ways of declaring tokens the other files, and what transformers answers: `written`,
texts as a chat template writes them; `plain`, prompts, in which no special token is named; `decoded`,
what token ids are as text; `chat`: the conversation. `actual`: ids of the declared tokens that are others than declared.
"""

import base64
import io
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers  # pyright: ignore[reportMissingImports]
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

OUT = Path(__file__).with_name("declared_tokens.json")
START, END, TOOL, PAD, IMAGE = "<|im_start|>", "<|im_end|>", "<tool>", "[PAD]", "<|image|>"
NAMES = (START, END, TOOL, PAD, IMAGE)
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "user assistant system",
    "Hello, how are you? I am fine.",
)
TEXTS_OF_CASE = 7
CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = (
    {"role": "user", "content": "the fox, a?"},
    {"role": "assistant", "content": "the dog."},
    {"role": "user", "content": "Hello, é日"},
)
OFF = {"lstrip": False, "rstrip": False, "single_word": False}


def sentencepiece_model() -> str:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return base64.b64encode(model.getvalue()).decode()


def byte_level(normalizer: Any = None) -> str:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(SENTENCES, trainer)
    if normalizer:
        library.normalizer = normalizer
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library.to_str()


def byte_fallback() -> str:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz</>|_", "▁t", "▁th", "▁the", "▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return library.to_str()


def bases() -> dict[str, dict[str, Any]]:
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    model = {"name": "tokenizer.model", "text": sentencepiece_model()}
    llama = names | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    generic = names | {"tokenizer_class": "PreTrainedTokenizerFast"}
    nfkc_lower = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])

    def file(text: str) -> dict[str, Any]:
        return {"name": "tokenizer.json", "text": text, "config": generic}

    return {
        "model": model | {"config": llama},
        "model, legacy": model | {"config": llama | {"legacy": True}},
        "model, no first space": model | {"config": llama | {"add_prefix_space": False}},
        "json, byte level": file(byte_level()),
        "json, lower case": file(byte_level(nfkc_lower)),
        "json, prepend": file(byte_fallback()),
    }


def declared(name: str, special: bool, **flags: bool) -> dict[str, Any]:
    return {"content": name, **OFF, "normalized": not special, "special": special} | flags


def ways(base: dict[str, Any], first: int) -> dict[str, dict[str, Any]]:
    """What each way of declaring tokens adds to files, which have `first` as their next id."""
    found = {
        "decoder": {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    str(first): declared(START, special=True),
                    str(first + 1): declared(END, special=True, rstrip=True),
                    str(first + 2): declared(TOOL, special=False),
                }
            }
        },
        "decoder, text": {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    str(first): declared(START, special=False, normalized=False),
                    str(first + 1): declared(END, special=False, single_word=True),
                }
            }
        },
        "decoder, bare": {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    str(first): {"content": START, "special": True},
                    str(first + 1): {"content": END},
                }
            }
        },
        "map, additional": {"special_tokens_map.json": {"additional_special_tokens": [START, END]}},
        "added": {"added_tokens.json": {START: first, END: first + 1, TOOL: first + 2}},
        "added, a gap": {"added_tokens.json": {START: first, END: first + 3}},
        "map": {
            "special_tokens_map.json": {
                "pad_token": {"content": PAD, **OFF, "lstrip": True, "normalized": False},
                "unk_token": "<unk>" if "<unk>" in base["text"] else None,
                "extra_special_tokens": [START],
            }
        },
        "map, end": {"special_tokens_map.json": {"eos_token": END}},
        "additional": {
            "tokenizer_config.json": {
                "additional_special_tokens": [
                    END,
                    {"__type": "AddedToken", **declared(TOOL, special=False, lstrip=True)},
                    {"__type": "AddedToken", "content": IMAGE},
                ]
            }
        },
        "extra by name": {
            "tokenizer_config.json": {"extra_special_tokens": {"image_token": IMAGE}}
        },
        "named": {"tokenizer_config.json": {"pad_token": PAD, "video_token": START}},
    }
    if base["name"] == "tokenizer.json":
        found["own"] = {
            "tokenizer.json": {"added": [{"id": first, **declared(START, special=False)}]}
        }
    for way in found.values():
        old_map = way.get("special_tokens_map.json", {})
        for name in [name for name, value in old_map.items() if value is None]:
            del old_map[name]
    return found


def next_id(base: dict[str, Any]) -> int:
    if base["name"] == "tokenizer.json":
        return max(json.loads(base["text"])["model"]["vocab"].values()) + 1
    model = base64.b64decode(base["text"])
    return sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()


def joined(chosen: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The files of several ways; None where two ways write the same field differently, or a list
    beside an object, which transformers drops beside a tokenizer.model only.
    """
    files = dict[str, Any]()
    for way in chosen:
        for name, fields in way.items():
            if set(fields) & set(files.get(name, {})):
                return None
            files[name] = files.get(name, {}) | fields
    listed = {"additional_special_tokens", "extra_special_tokens"}
    return None if listed <= set(files.get("tokenizer_config.json", {})) else files


def write_folder(base: dict[str, Any], files: dict[str, Any], folder: Path) -> None:
    config = base["config"] | files.get("tokenizer_config.json", {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("added_tokens.json", "special_tokens_map.json"):
        if name in files:
            (folder / name).write_text(json.dumps(files[name]))
    if base["name"] == "tokenizer.model":
        (folder / base["name"]).write_bytes(base64.b64decode(base["text"]))
        return
    content = json.loads(base["text"])
    content["added_tokens"] += files.get("tokenizer.json", {}).get("added", [])
    (folder / base["name"]).write_text(json.dumps(content))


def texts(draw: random.Random, count: int, names: tuple[str, ...], legacy: bool) -> list[str]:
    """Random texts without runs of spaces, which transformers' conversion of a tokenizer.model cuts
    otherwise than SentencePiece itself does; `legacy`: also without a space after a name, which
    then follows the dummy space.
    """
    words = ["the", "fox", "a", "é", "日", ".", ",", "\n", "</", "<", "|>", "Dog", "x_"]
    found = []
    for _ in range(count):
        pieces = draw.choices([*words, *names, *names, *(name.upper() for name in names)], k=9)
        spaces = draw.choices(["", "", " "], k=9)
        spaces[0] = ""
        for place in range(1, len(pieces)):
            if legacy and pieces[place - 1] in names:
                spaces[place] = ""
        found.append("".join(map("".join, zip(spaces, pieces, strict=True))))
    return found


def declared_ids(files: dict[str, Any]) -> dict[str, int]:
    """Ids by name that the files give and transformers reads."""
    config = files.get("tokenizer_config.json", {})
    ids = {
        token["content"]: token["id"] for token in files.get("tokenizer.json", {}).get("added", [])
    }
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"]
        return ids | {token["content"]: int(id) for id, token in decoder.items()}
    return ids | files.get("added_tokens.json", {})


def answered(base: dict[str, Any], files: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(base, files, Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in declared_ids(files)}
    actual = {name: id for name, id in ids.items() if id != declared_ids(files)[name]}
    if actual:
        return {"files": files, "actual": actual}
    vocabulary = tokenizer.get_vocab()
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    old_map = files.get("special_tokens_map.json", {})
    # To jaxserve these are special also where added_tokens.json has them.
    special |= set(old_map.get("additional_special_tokens", []))
    harmless = tuple(name for name in NAMES if name not in special)
    legacy = base["config"].get("legacy", False)
    written = texts(draw, TEXTS_OF_CASE, (*NAMES, "<s>", "</s>"), legacy)
    plain = texts(draw, 2, harmless, legacy)
    # Under the normalizer that prepends, the library shows special tokens that are normalized.
    named = ("<s>", "</s>") if "Prepend" in base["text"] else (*NAMES, "<s>", "</s>")
    named = [name for name in named if name not in old_map.get("additional_special_tokens", [])]
    known = [vocabulary[name] for name in named if name in vocabulary]
    words = range(next_id(base) - 20, next_id(base))  # no bytes that are no character
    decoded = [draw.choices([*known, *words], k=12) for _ in range(2)]

    def encoded(names: list[str], **options: Any) -> list[tuple[str, list[int]]]:
        return [(text, list(tokenizer.encode(text, **options))) for text in names]

    return {
        "files": files,
        "eos": tokenizer.eos_token_id,
        "written": encoded(written, add_special_tokens=False),
        "plain": encoded(plain),
        "chat": list(
            tokenizer.apply_chat_template(
                list(MESSAGES), tokenize=True, return_dict=False, add_generation_prompt=True
            )
        ),
        "decoded": [(ids, tokenizer.decode(ids, skip_special_tokens=True)) for ids in decoded],
    }


def main() -> None:
    draw = random.Random(0)
    made = bases()
    cases = []
    for name, base in made.items():
        each = ways(base, next_id(base))
        subsets = [*itertools.combinations(each, 1), *itertools.combinations(each, 2)]
        for subset in subsets:
            files = joined([each[way] for way in subset])
            if files is not None:
                answer = answered(base, files, draw)
                cases.append({"base": name, "ways": subset} | answer)
    head = json.dumps(made, ensure_ascii=False)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    messages = json.dumps(MESSAGES, ensure_ascii=False)
    OUT.write_text(
        f'{{"bases": {head},\n"messages": {messages},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8"
    )
    print(len(cases), "cases", sum(len(case.get("written", [])) for case in cases), "texts")


if __name__ == "__main__":
    main()
