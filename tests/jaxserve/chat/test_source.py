"""Chat templates and names of tokens in checkpoint folders."""

import json
from pathlib import Path

import pytest

from jaxserve.chat.source import ADDITIONAL, ChatTemplate, read_templates
from jaxserve.errors import ChatError
from tests.byte_tokenizer import ByteTokenizer

NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]


def template_in(folder: Path, tokenizer: ByteTokenizer, file: Path | None = None) -> ChatTemplate:
    return read_templates(folder, tokenizer, file).default


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        file.write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"tokenizer_config__json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config__json": {"chat_template": NAMED}}, "listed"),
        (
            {
                "chat_template__json": {"chat_template": "json"},
                "tokenizer_config__json": {"chat_template": "c"},
            },
            "json",
        ),
        ({"chat_template__jinja": "é\n", "chat_template__json": {"chat_template": "json"}}, "é\n"),
    ],
)
def test_places(files: dict, source: str, tmp_path: Path) -> None:
    write(tmp_path, **files)
    assert template_in(tmp_path, ByteTokenizer()).source == source
    write(tmp_path, other__jinja="other")
    assert template_in(tmp_path, ByteTokenizer(), tmp_path / "other.jinja").source == "other"


FIELD = {"tokenizer_config__json": {"chat_template": NAMED}}
TOOLS = {f"{ADDITIONAL}/tool_use__jinja": "tools"}


@pytest.mark.parametrize(
    ("files", "sources", "notes"),
    [
        (FIELD, ("listed", "tools"), 0),
        ({"chat_template__json": {"chat_template": NAMED}}, ("listed", "tools"), 0),
        ({"tokenizer_config__json": {"chat_template": NAMED[1:]}}, ("listed", None), 0),
        ({"chat_template__jinja": "file"} | TOOLS, ("file", "tools"), 0),
        # As in transformers 5, the file goes before the whole list.
        ({"chat_template__jinja": "file"} | FIELD, ("file", None), 1),
        ({"chat_template__jinja": "listed"} | TOOLS | FIELD, ("listed", "tools"), 0),
        ({"chat_template__jinja": "listed"} | FIELD, ("listed", None), 1),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [*NAMED, {"name": "rag", "template": ""}]
                }
            },
            ("listed", "tools"),
            1,
        ),
        (TOOLS | FIELD, ("listed", "tools"), 1),
        ({f"{ADDITIONAL}/default__jinja": "x", "chat_template__jinja": "file"}, ("file", None), 0),
        ({"chat_template__jinja": "file", f"{ADDITIONAL}/rag__jinja": "\0"}, ("file", None), 1),
        (
            {
                "chat_template__jinja": "file",
                "tokenizer_config__json": {"chat_template": ["x", None]},
            },
            ("file", None),
            0,
        ),
        (
            {"chat_template__json": {"chat_template": "a"}}
            | {"tokenizer_config__json": {"chat_template": "b"}},
            ("a", None),
            1,
        ),
        (
            {"chat_template__json": {"chat_template": "a"}}
            | {"tokenizer_config__json": {"chat_template": "a"}},
            ("a", None),
            0,
        ),
    ],
)
def test_templates_by_their_names(
    files: dict, sources: tuple[str, str | None], notes: int, tmp_path: Path
) -> None:
    (tmp_path / ADDITIONAL).mkdir()
    write(tmp_path, **files)
    found = read_templates(tmp_path, ByteTokenizer())
    used = found.with_tools.source if found.with_tools else None
    assert (found.default.source, used) == sources
    assert len(found.notes) == notes
    write(tmp_path, other__jinja="other")
    assert len(read_templates(tmp_path, ByteTokenizer(), tmp_path / "other.jinja").all) == 1


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_link_that_leads_nowhere(name: str, tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config__json={"chat_template": "config"})
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(ChatError, match=f"{name}: .*No such file"):
        read_templates(tmp_path, ByteTokenizer())


def test_a_folder_of_templates_that_leads_nowhere(tmp_path: Path) -> None:
    write(tmp_path, chat_template__jinja="file")
    (tmp_path / ADDITIONAL).symlink_to("gone")
    with pytest.raises(ChatError, match=f"{ADDITIONAL}: No such file"):
        read_templates(tmp_path, ByteTokenizer())


def test_tokens(tmp_path: Path) -> None:
    write(tmp_path, chat_template__jinja="")
    assert template_in(tmp_path, ByteTokenizer()).tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    settings = {
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
        "add_bos_token": True,
        "x_token": "x",
    }
    write(
        tmp_path,
        tokenizer_config__json=settings,
        special_tokens_map__json={"eos_token": "old", "sep_token": "|"},
    )
    tokens = {"bos_token": "<bos>", "eos_token": "old", "x_token": "x", "sep_token": "|"}
    assert template_in(tmp_path, ByteTokenizer()).tokens == tokens, "as transformers reads it"
    write(tmp_path, tokenizer_config__json=settings | {"added_tokens_decoder": {}})
    tokens = {"bos_token": "<bos>", "eos_token": "</s>", "x_token": "x"}
    assert template_in(tmp_path, ByteTokenizer()).tokens == tokens


def test_a_token_that_is_the_empty_string(tmp_path: Path) -> None:
    settings = {"bos_token": "", "eos_token": "</s>"}
    write(tmp_path, chat_template__jinja="", tokenizer_config__json=settings)
    assert template_in(tmp_path, ByteTokenizer()).tokens == settings


ADDITIONAL_TOKENS = {"additional_special_tokens": ["<|user|>", {"content": "<|end|>"}, "<|user|>"]}


@pytest.mark.parametrize(
    ("settings", "old_map", "expected"),
    [
        (ADDITIONAL_TOKENS, {}, ["<|user|>", "<|end|>"]),
        (ADDITIONAL_TOKENS, {"additional_special_tokens": ["<|x|>"]}, ["<|x|>"]),
        (
            ADDITIONAL_TOKENS | {"added_tokens_decoder": {}},
            {"additional_special_tokens": ["<|x|>"]},
            ["<|user|>", "<|end|>"],
        ),
        ({"extra_special_tokens": ["<|user|>"]}, {}, ["<|user|>"]),
        ({"additional_special_tokens": []}, {}, None),
        ({"extra_special_tokens": {"image_token": "<|image|>"}}, {}, None),
    ],
)
def test_additional_special_tokens(
    settings: dict, old_map: dict, expected: list[str] | None, tmp_path: Path
) -> None:
    """Chat templates of transformers 4 may read them, where some are listed."""
    write(
        tmp_path,
        chat_template__jinja="{{ additional_special_tokens[0] }}",
        tokenizer_config__json=settings,
        special_tokens_map__json=old_map,
    )
    tokens = template_in(tmp_path, ByteTokenizer()).tokens
    assert tokens.get("additional_special_tokens") == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no chat template; give one with --chat-template FILE"),
        (
            {"tokenizer_config__json": {"chat_template": None}},
            "has no chat template; give one with --chat-template FILE",
        ),
        (
            {"tokenizer_config__json": {"chat_template": NAMED[:1]}},
            r"none of the chat templates \['tool_use'\] is called",
        ),
        (
            {"tokenizer_config__json": {"chat_template": [*NAMED, NAMED[1]]}},
            "with a name for each",
        ),
        (
            {"tokenizer_config__json": {"chat_template": 7}},
            "has the chat template 7; it must be a string",
        ),
        (
            {"tokenizer_config__json": {"chat_template": "x" * 262145}},
            "has 262145 bytes; the limit is 262144",
        ),
        ({"chat_template__jinja": "x" * 262145}, "has 262145 bytes; the limit is 262144"),
        ({"chat_template__json": "{"}, "chat_template.json: not readable as JSON"),
        (
            {"chat_template__json": "[]"},
            "chat_template.json: holds list where an object is expected",
        ),
    ],
)
def test_what_is_refused(files: dict, message: str, tmp_path: Path) -> None:
    write(tmp_path, **files)
    with pytest.raises(ChatError, match=message) as caught:
        template_in(tmp_path, ByteTokenizer())
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"^chat_template: .*nowhere: No such file or directory$"):
        template_in(tmp_path, ByteTokenizer(), tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ChatError, match=r"latin is not UTF-8 text \(byte 0: "):
        template_in(tmp_path, ByteTokenizer(), tmp_path / "latin")
