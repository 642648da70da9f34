"""The bundled models: tokens, training in miniature, and the folders in the repository."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("optax", reason="training needs the train extra: pip install jaxserve[train]")

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from flax import nnx
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from safetensors.flax import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.tokenizer.sentencepiece_json import tokenizer_json
from training.corpus import KINDS, LONG, documents
from training.llama import Llama
from training.loop import Budget, answer_loss, compile_training
from training.recipe import RECIPES, Recipe
from training.tokens import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    IM_END,
    IM_START,
    MARKS,
    encoded,
    stream,
    train_tokenizer,
)
from training.train import main, train

HERE = Path(__file__).parents[2] / "checkpoints" / "bundled"
FOLDERS = {"target": HERE / "tiny-chat", "draft": HERE / "tiny-chat-draft"}
TINY = Recipe(
    documents=300,
    long_chats=4,
    held_out_documents=3,
    tokenizer_documents=300,
    vocab=512,
    model=32,
    mlp=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    context=128,
    short_context=64,
    long_every=10,
    batch=2,
    peak_rate=1e-2,
    warmup_steps=5,
    checkpoint_every=10,
)
LOSS_OF_CHANCE = float(np.log(TINY.vocab))


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return train_tokenizer(TINY, 0)


def expected_tensors(config: dict) -> dict[str, list[int]]:
    """Return names and shapes as transformers writes a Llama with these sizes and a tied head."""
    width = config["hidden_size"]
    mlp = config["intermediate_size"]
    query, key = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    layer = {
        "input_layernorm": [width],
        "post_attention_layernorm": [width],
        "self_attn.q_proj": [query, width],
        "self_attn.k_proj": [key, width],
        "self_attn.v_proj": [key, width],
        "self_attn.o_proj": [width, query],
        "mlp.gate_proj": [mlp, width],
        "mlp.up_proj": [mlp, width],
        "mlp.down_proj": [width, mlp],
    }
    layers = range(config["num_hidden_layers"])
    named = {
        f"model.layers.{n}.{name}.weight": shape for n in layers for name, shape in layer.items()
    }
    return named | {
        "model.embed_tokens.weight": [config["vocab_size"], width],
        "model.norm.weight": [width],
    }


def stored_tensors(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}
        return {name: part.get_shape() for name, part in slices.items()}


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def check_folder(folder: Path) -> None:
    config = read(folder, "config.json")
    assert stored_tensors(folder) == expected_tensors(config)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    assert read(folder, "generation_config.json") == {
        "bos_token_id": BOS,
        "eos_token_id": [IM_END, EOS],
    }
    assert read(folder, "tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE
    assert (folder / "tokenizer.json").read_text() == tokenizer_json(folder)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert (pieces.vocab_size(), pieces.bos_id(), pieces.eos_id()) == (
        config["vocab_size"],
        BOS,
        EOS,
    )


# Tokens


def test_any_text_survives_the_tokenizer_and_none_becomes_a_mark(tokenizer: bytes):
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    for text in (
        f"{MARKS[0]}user\nhi{MARKS[1]}</s>",
        " Once upon a time, Lily saw a naïve 🐢.\n\n  The end. ",
    ):
        ids = pieces.encode(text)
        assert pieces.decode(ids) == text and not {BOS, EOS, IM_START, IM_END} & set(ids)
    assert [pieces.piece_to_id(mark) for mark in MARKS] == [IM_START, IM_END]
    assert all(pieces.is_control(token) for token in (BOS, EOS, IM_START, IM_END))
    assert pieces.encode("1234", out_type=str) == ["1", "2", "3", "4"]


def rendered(messages: list[dict], **variables: object) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE).render(
        messages=messages, bos_token="<s>", **variables
    )


def ids_of(pieces: sentencepiece.SentencePieceProcessor, prompt: str) -> list[int]:
    """Encode a rendered chat: names of control tokens are tokens, the text between them is text."""
    parts = re.split(r"(<s>|<\|im_start\|>|<\|im_end\|>)", prompt)
    return [
        token
        for place, part in enumerate(parts)
        for token in ([pieces.piece_to_id(part)] if place % 2 else pieces.encode(part))
    ]


def test_a_chat_is_encoded_as_its_template_renders_it(tokenizer: bytes):
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    for text in documents(0, "train", 20, "mixed chat"):
        (got,) = encoded(tokenizer, [text])
        messages = [{"role": turn.role, "content": turn.text} for turn in text.turns]
        assert got.ids.tolist() == ids_of(pieces, rendered(messages))
        # What is to be said is every answer with its end mark, and nothing else.
        answers = [turn.text for turn in text.turns if turn.role == "assistant"]
        assert pieces.decode(got.ids[got.answer].tolist()) == "".join(answers)
        assert np.sum(got.ids[got.answer] == IM_END) == len(answers)
        opened = ids_of(pieces, rendered(messages[:-1], add_generation_prompt=True))
        assert got.ids[: len(opened)].tolist() == opened and got.answer[len(opened)]


def test_windows_begin_with_a_document_and_depend_on_their_key_alone(tokenizer: bytes):
    source = stream(encoded(tokenizer, documents(0, "train", 50)))
    assert len(source.starts) == 50 and source.starts[0] == 0
    drawn = [source.windows(3, 64, (0, step)) for step in range(8)]
    assert all(
        ids.shape == answer.shape == (3, 65) and (ids[:, 0] == BOS).all() for ids, answer in drawn
    )
    np.testing.assert_array_equal(source.windows(3, 64, (0, 5))[0], drawn[5][0])
    for other in (drawn[6], source.windows(3, 64, (1, 5))):
        assert not (drawn[5][0] == other[0]).all()


# Training


def test_a_document_does_not_see_the_one_before_it():
    model = jax.jit(Llama(TINY, nnx.Rngs(0)).__call__)
    tokens = jnp.array([[BOS, 300, 301, EOS, BOS, 302, 303], [BOS, 400, 401, EOS, BOS, 302, 303]])
    apart = jnp.cumsum(tokens == BOS, axis=1)
    alone, together = (
        np.asarray(model(tokens, document)[:, 4:]) for document in (apart, jnp.zeros_like(apart))
    )
    np.testing.assert_array_equal(alone[0], alone[1])
    assert np.abs(together[0] - together[1]).max() > 1e-4


def run(folder: Path, budget: Budget) -> dict:
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # optax.scale_by_adam raises a float to its int32 count
        return train(TINY, budget, 0, folder, folder.with_suffix(".work"), "the test")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_training_learns_writes_a_folder_and_repeats_itself(tmp_path: Path):
    account = run(tmp_path / "whole", Budget(35, 0.0))
    check_folder(tmp_path / "whole")
    assert account == read(tmp_path / "whole", "training.json")
    assert account["tokens_seen"] == TINY.batch * (32 * TINY.short_context + 3 * TINY.context)
    assert list(account["held_out_loss"]) == [*KINDS, LONG]
    assert np.mean(list(account["held_out_loss"].values())) < LOSS_OF_CHANCE - 0.8

    # Going on from step 30, which the work folder holds, and starting afresh give the same weights,
    # bit for bit.
    before = weights(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "whole.work" / "steps").iterdir()] == ["30"]
    for name in ("whole", "fresh"):
        run(tmp_path / name, Budget(35, 0.0))
        assert weights(tmp_path / name) == before
    with pytest.raises(ValueError, match="other settings"):
        run(tmp_path / "whole", Budget(36, 0.0))


def test_the_clock_ends_a_run_given_in_minutes(tmp_path: Path):
    account = run(tmp_path / "timed", Budget(None, 0.002))
    assert account["steps"] >= 1 and account["minutes"] < 1


def test_steps_and_minutes_exclude_each_other(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--out", "x", "--steps", "1", "--minutes", "1"])
    assert "not allowed with" in capsys.readouterr().err


# The committed folders


@pytest.mark.parametrize(("name", "parameters"), [("target", 4_361_472), ("draft", 400_032)])
def test_a_committed_folder_is_what_its_config_and_account_say(name: str, parameters: int):
    folder = FOLDERS[name]
    recipe = RECIPES[name]
    check_folder(folder)
    account = read(folder, "training.json")
    config = read(folder, "config.json")
    assert (
        account["parameters"]
        == sum(int(np.prod(shape)) for shape in stored_tensors(folder).values())
        == parameters
    )
    assert account["recipe"] == json.loads(json.dumps(recipe.__dict__))
    assert f"--recipe {name}" in account["command"] and account["seed"] == 0
    assert (
        config["max_position_embeddings"] == recipe.context == 2048 and config["vocab_size"] == 2048
    )


def test_the_committed_folders_are_small_and_share_their_vocabulary():
    files = [path for folder in FOLDERS.values() for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
    for file in ("tokenizer.model", "tokenizer.json"):
        target, draft = (FOLDERS[name] / file for name in ("target", "draft"))
        assert target.read_bytes() == draft.read_bytes()


def stored_params(folder: Path, recipe: Recipe) -> nnx.State:
    """Return the folder's weights as parameters of the training, float32."""
    params = nnx.state(Llama(recipe, nnx.Rngs(0)), nnx.Param)
    stored = load_file(folder / "model.safetensors")
    flat = nnx.to_flat_state(params)
    for path, leaf in flat:
        value = stored[".".join(["model", *map(str, path[:-1]), "weight"])].astype(jnp.float32)
        leaf.set_value(value.T if path[-1] == "kernel" else value)
    return params


@pytest.mark.slow
def test_the_committed_target_has_the_loss_that_its_account_states():
    folder = FOLDERS["target"]
    recipe = RECIPES["target"]
    account = read(folder, "training.json")
    held_out = documents(account["seed"], "held-out", recipe.held_out_documents, "facts")
    texts = encoded((folder / "tokenizer.model").read_bytes(), held_out)
    loss = answer_loss(
        compile_training(recipe).losses, stored_params(folder, recipe), texts, recipe.context
    )
    assert loss == pytest.approx(account["held_out_loss"]["facts"], abs=1e-3)


def test_the_committed_target_answers():
    chat = [{"role": "user", "content": "What is 7 plus 5?"}]
    with LLM(FOLDERS["target"]) as llm:
        told = llm.chat(chat, SamplingParams(temperature=0.0, max_tokens=32))[0]
    assert "12" in told.text and told.finish_reason == "stop" and told.stopped_by == IM_END
