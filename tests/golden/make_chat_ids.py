"""Writes chat_ids.json: conversations as token ids, by transformers'
apply_chat_template(tokenize=True).

    JAXSERVE_TEST_DATA=DIR python tests/golden/make_chat_ids.py

Needs transformers (5.23.0 made the committed file), sentencepiece and jinja2; not part of the
tests' environment.

Each case has `files`, what its folder needs besides a published tokenizer (`source`, a path in the
data folder; none for tokenizers made here): texts, or base64 where the name ends with .model.
`added`: added tokens to append to the published tokenizer.json. `text` and `ids`: the answer.
"""

import base64
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import transformers  # pyright: ignore[reportMissingImports]

OUT = Path(__file__).with_name("chat_ids.json")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] | trim + eos_token }}{% else %}{{ raise_exception('Only user and "
    "assistant') }}{% endif %}"
    "{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "assistant", "content": " I am fine.\n\nAnd  you, naïve café? 日本語 😀 "},
    {"role": "user", "content": "  leading spaces, numbers 12345\n"},
]
WITH_SYSTEM = [
    {"role": "system", "content": "the quick brown fox"},
    *TURNS,
    {"role": "assistant", "content": ""},
]
# Runs of spaces transformers' conversion of a published tokenizer.model cuts otherwise than
# SentencePiece itself does.
SINGLY_SPACED = [
    {**turn, "content": re.sub(" +", " ", turn["content"]).strip(" ")} for turn in TURNS
]
THINKING = [TURNS[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine."}, TURNS[2]]
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "user assistant system",
    "Hello, how are you? I am fine.",
)


def trained_model() -> bytes:
    """A SentencePiece model with the marks of ChatML as control symbols."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def converted(model: bytes, special: dict[str, Any]) -> str:
    """The same tokenizer as transformers writes it to tokenizer.json; special: how its control
    symbols take spaces.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").write_bytes(model)
        Path(folder, "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "LlamaTokenizer"})
        )
        tokens = [
            transformers.AddedToken(f"<|im_{end}|>", special=True, **special)
            for end in ("start", "end")
        ]
        tokenizer = transformers.LlamaTokenizer.from_pretrained(
            folder, additional_special_tokens=tokens
        )
        tokenizer.save_pretrained(folder)
        return Path(folder, "tokenizer.json").read_text()


def config(template: str, **fields: Any) -> str:
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    return json.dumps(names | fields | {"chat_template": template}, ensure_ascii=False)


def cases(data: Path) -> list[dict[str, Any]]:
    model = trained_model()
    published = {"source": "tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3"}
    packed = base64.b64encode(model).decode()
    marks = ["<|im_start|>", "<|im_end|>"]
    inst = ["[INST]", "[/INST]"]
    gpt2 = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    deepseek = "tokenizers/deepseek_r1/tokenizer_config.json"
    made = [
        {
            "name": "sentencepiece",
            "files": {"tokenizer.model": packed, "tokenizer_config.json": config(CHATML)},
        },
        {
            "name": "sentencepiece, legacy",
            "files": {
                "tokenizer.model": packed,
                "tokenizer_config.json": config(CHATML, legacy=True),
            },
        },
        *(
            {
                "name": f"tokenizer.json of SentencePiece, {name}",
                "files": {
                    "tokenizer.json": converted(model, special),
                    "tokenizer_config.json": config(CHATML),
                },
            }
            for name, special in (
                ("plain", {}),
                ("rstrip", {"rstrip": True}),
                ("lstrip", {"lstrip": True}),
            )
        ),
        {"name": "mistral v3", **published, "files": {"tokenizer_config.json": config(INST)}},
        {
            "name": "gpt2 with ChatML",
            "source": "tokenizers/gpt2/tokenizer.json",
            "added": marks,
            "files": {"tokenizer_config.json": config(CHATML, **gpt2)},
        },
        {
            "name": "deepseek r1",
            "source": "tokenizers/deepseek_r1/tokenizer.json",
            "files": {"tokenizer_config.json": (data / deepseek).read_text()},
        },
    ]
    for case in made:
        case["special"] = (
            inst if "mistral" in case["name"] else marks if "deepseek" not in case["name"] else []
        )
    return made


def conversations(case: dict[str, Any]) -> list[list[dict[str, str]]]:
    if "mistral" in case["name"]:
        return [TURNS[:1], SINGLY_SPACED]
    return [TURNS[:1], TURNS, THINKING if "deepseek" in case["name"] else WITH_SYSTEM]


def write_folder(case: dict[str, Any], data: Path, folder: Path) -> None:
    for name, text in case["files"].items():
        (folder / name).write_bytes(
            base64.b64decode(text) if name.endswith(".model") else text.encode()
        )
    if "source" in case:
        name = "tokenizer.json" if case["source"].endswith(".json") else "tokenizer.model"
        shutil.copyfile(data / case["source"], folder / name)
    if "added" in case:
        append_tokens(folder / "tokenizer.json", case["added"])


def append_tokens(file: Path, names: list[str]) -> None:
    content = json.loads(file.read_text())
    first = 1 + max(token["id"] for token in content["added_tokens"])
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": first + i, "content": n, "special": True, **off} for i, n in enumerate(names)
    ]
    file.write_text(json.dumps(content))


def answered(case: dict[str, Any], data: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(case, data, Path(folder))
        special = {"additional_special_tokens": case.pop("special")}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **special)
        turns = []
        for messages in conversations(case):
            ask = {"add_generation_prompt": True}
            text = tokenizer.apply_chat_template(messages, tokenize=False, **ask)
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **ask)
            turns.append({"messages": messages, "text": text, "ids": list(ids)})
    return case | {"conversations": turns}


if __name__ == "__main__":
    root = Path(os.environ["JAXSERVE_TEST_DATA"])
    answers = [answered(case, root) for case in cases(root)]
    lines = ",\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
    OUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
