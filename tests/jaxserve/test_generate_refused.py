"""Refusals of the command line: one line on standard error, and exit code 2."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.jaxserve.generate_harness import (
    STORY,
    Call,
    assert_refused,
    caller,
    copied,
)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(tmp_path)


def write_header(path: Path, header: str, body: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + body)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def claim_more(folder: Path) -> None:
    header = '{"model.norm.weight": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}'
    write_header(folder / "model.safetensors", header, b"\0" * 16)


def duplicate_key(folder: Path) -> None:
    entry = '"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    write_header(folder / "model.safetensors", "{" + entry + "," + entry + "}", b"\0" * 4)


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a checkpoint at all")


def index_without_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.json").unlink()


def wrong_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"intermediate_size": config["intermediate_size"] + 8})
    )


def unknown_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"secret_sauce": 1}))


def nothing_of_the_model(folder: Path) -> None:
    save_file({"x": np.zeros(3, np.float32)}, folder / "model.safetensors")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


SPOILED: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "model.safetensors"),
    (claim_more, "model.safetensors"),
    (duplicate_key, "model.norm.weight"),
    (garbage, "model.safetensors"),
    (index_without_file, "model-00001-of-00002.safetensors"),
    (only_pickle, "pickle"),
    (no_tokenizer, "tokenizer.model"),
    (wrong_shape, "config.json makes it"),
    (unknown_field, "secret_sauce"),
    (nothing_of_the_model, "lacks"),
    (no_config, "config.json"),
]


@pytest.mark.parametrize(
    ("spoil", "message"), SPOILED, ids=[spoil.__name__ for spoil, _ in SPOILED]
)
def test_checkpoint_that_is_refused(
    call, folder: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder)
    assert_refused(call("--prompt", STORY, model=folder), message)


FLAGS: list[tuple[list[str], str]] = [
    (["--prompt", STORY, "--max-tokens", "4000"], "lower max_tokens"),
    (["--prompt", STORY * 100, "--max-tokens", "1"], "exceed the context of 64"),
    (["--prompt", STORY, "--temperature", "-1"], "temperature"),
    (
        ["--prompt", STORY, "--min-tokens", "9", "--max-tokens", "3"],
        "min_tokens is 9, more than max_tokens",
    ),
    (
        ["--prompt", STORY, "--allowed-token-ids", "1,99999"],
        "allowed_token_ids has 99999 as entry 1",
    ),
    (["--prompt", STORY, "--stop", ""], "stop"),
    (["--prompts-file", "/nonexistent/prompts.txt"], "/nonexistent/prompts.txt"),
    (["--prompt", STORY, "--dtype", "int7"], "--dtype is int7; choose auto"),
    (
        ["--prompt", STORY, "--kv", "int4"],
        "--kv is int4; choose one of auto, float32, bfloat16, int8, fp8",
    ),
    (
        ["--prompt", STORY, "--weights", "int3"],
        "--weights is int3; choose auto, int8, fp8, int4, int4-g32",
    ),
    (
        ["--prompt", STORY, "--weights", "int4-g128"],
        "sums 96 numbers, no multiple of 128 (groups of 32 do)",
    ),
    (
        ["--prompt", STORY, "--weights", "int8+head"],
        "no head beside its embedding (leave +head out)",
    ),
    (["--prompt", STORY, "--tensor", "3"], "does not divide by mesh axis 'tensor' of size 3"),
    (["--prompt", STORY, "--data", "64"], "needs 64 devices; 8 are present"),
    (
        ["--prompt", STORY, "--decode-steps", "0"],
        "--decode-steps is 0; it must be between 1 and 64",
    ),
    (
        ["--prompt", STORY, "--decode-steps", "40"],
        "--decode-steps is 40; it must be at most --step-tokens (32;",
    ),
    (
        ["--prompt", STORY, "--decode-steps", "4", "--deterministic"],
        "--deterministic launches decode steps one by one",
    ),
    (["--prompt", STORY, "--attention", "magic"], "attention 'magic' is not built in"),
    (["--prompt", STORY, "--page-size", "0"], "--page-size is 0"),
    (["--prompt", STORY, "--max-batch", "0"], "--max-batch is 0; it must be between 1 and"),
    (["--prompt", STORY, "--step-tokens", "0"], "--step-tokens is 0; it must be between 1 and"),
    (
        ["--prompt", STORY, "--step-tokens", "1"],
        "--step-tokens is 1; it must be at least --max-batch (2)",
    ),
    (["--prompt", STORY, "--max-context", "0"], "--max-context is 0; it must be at least 1"),
    (["--prompt", STORY, "--cache-tokens", "0"], "--cache-tokens is 0; it must be at least 1"),
    (["--prompt", STORY, "--cache-tokens", "3"], "it must be at least a page of"),
    (["--prompt", STORY, "--logprobs", "2"], "--logprobs is shown in JSON only (add --json)"),
    (["--prompt", STORY, "--prompt-logprobs", "2"], "--prompt-logprobs is shown in JSON only"),
    (["--prompt", STORY, "--stop", "\udcff"], "not valid Unicode"),
    (["--prompt", "\udcff"], "half a surrogate pair"),
    (["--prompt", STORY, "--system", "x"], "--system is for a conversation (add --chat)"),
    (
        ["--prompt", STORY, "--chat-template", "x"],
        "--chat-template is for a conversation (add --chat)",
    ),
    (
        ["--chat", "--prompt", STORY, "--n", "2"],
        "--n is 2, but a turn of a conversation has one answer",
    ),
    (
        ["--chat", "--prompt", STORY, "--echo"],
        "--echo is given, but a turn of a conversation has one answer",
    ),
    (
        ["--chat", "--prompt", STORY, "--chat-template", "/none"],
        "--chat-template is /none; it cannot be read: No such file",
    ),
    (["--prompts-file", "/dev/null"], "--prompts-file is /dev/null; it has no prompts"),
    (["--prompt", STORY, "--cache-tokens", str(10**12)], "--cache-tokens asks for"),
    (["--prompt", STORY, "--max-context", "999999"], "--max-context is 999999"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[message for _, message in FLAGS])
def test_flags_that_are_refused(call, flags: list[str], message: str) -> None:
    context = [] if "--max-context" in flags else ["--max-context", "64"]
    assert_refused(call(*context, *flags), message)


def test_prompt_longer_than_the_page_pool(call) -> None:
    assert_refused(
        call("--prompt", STORY * 20, "--cache-tokens", "32", "--max-tokens", "1"), "--cache-tokens"
    )


def test_model_folder_that_is_not_there(call) -> None:
    assert_refused(call("--prompt", STORY, model="/nonexistent/model"), "/nonexistent/model")
