"""GetTokenizer: its files are enough to tokenize and to render chats as the server does."""

import asyncio
import hashlib
import io
import random
from pathlib import Path
from zipfile import ZipFile

import jinja2
import pytest
import tokenizers
from smg_grpc_proto.generated import common_pb2

from jaxserve.chat import Chat
from jaxserve.errors import NotBuiltInError
from jaxserve.server.grpc.tokenizer_bundle import tokenizer_bundle
from jaxserve.server.grpc.vllm import CHUNK_BYTES
from jaxserve.tokenizer import load_tokenizer
from tests.jaxserve.server.grpc.vllm_harness import serving
from tests.tokenizer_cases import TEXTS, write_small

MODEL = Path(__file__).parents[4] / "checkpoints" / "bundled" / "tiny-chat"


def unpacked(bundle: bytes) -> dict[str, bytes]:
    with ZipFile(io.BytesIO(bundle)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.system
def test_it_tokenizes_and_chats_as_the_server_does() -> None:
    ours = load_tokenizer(MODEL)
    chat = Chat(MODEL, ours)
    bundle = tokenizer_bundle(chat)
    assert bundle == tokenizer_bundle(chat), "replicas hand out the same"
    files = unpacked(bundle)
    assert files.keys() == {
        *(
            "tokenizer.json",
            "tokenizer_config.json",
            "config.json",
            "generation_config.json",
            "chat_template.jinja",
        ),
    }
    theirs = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in TEXTS:
        assert theirs.encode(text).ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    messages = [{"role": "user", "content": "What is 7 plus 5?"}]
    template = jinja2.Environment().from_string(files["chat_template.jinja"].decode())
    text = template.render(messages=messages, bos_token="<s>", add_generation_prompt=True)
    rendered = chat.render(messages)
    chat.close()
    assert tuple(theirs.encode(text, add_special_tokens=False).ids) == rendered.token_ids


def test_the_template_is_the_one_that_is_used(tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0]['content'] }}")
    files = unpacked(tokenizer_bundle(Chat(MODEL, load_tokenizer(MODEL), file)))
    assert files["chat_template.jinja"] == file.read_bytes()


def test_a_tokenizer_json_goes_as_it_is(tmp_path: Path) -> None:
    write_small("json-byte-level", tmp_path)
    files = unpacked(tokenizer_bundle(Chat(tmp_path, load_tokenizer(tmp_path))))
    assert files == {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}


def test_a_model_that_cannot_be_written_so_is_named(tmp_path: Path) -> None:
    write_small("sp-every-space", tmp_path)
    with pytest.raises(NotBuiltInError, match="normalizes its text") as caught:
        tokenizer_bundle(Chat(tmp_path, load_tokenizer(tmp_path)))
    assert str(tmp_path) not in str(caught.value)


def test_in_chunks_with_a_fingerprint_at_the_end(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "config.json").write_bytes(
        random.Random(0).randbytes(2 * CHUNK_BYTES)
    )  # as large when it is packed

    async def main() -> None:
        async with serving(tmp_path) as (server, engine):
            chunks = [
                chunk async for chunk in engine.GetTokenizer(common_pb2.GetTokenizerRequest())
            ]
            data = b"".join(chunk.data for chunk in chunks)
            assert len(chunks) > 1 and data == tokenizer_bundle(server.service.prompts.chat)
            assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [
                hashlib.sha256(data).hexdigest()
            ]

    asyncio.run(main())
