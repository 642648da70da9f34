"""The bundled checkpoint: its corpus, its training in miniature, and the folder that is committed."""

import json
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("optax", reason="training needs the train extra: pip install jaxserve[train]")

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from flax import nnx
from safetensors import safe_open

from checkpoints.bundled import corpus
from checkpoints.bundled.train import BOS, EOS, Budget, Llama, Recipe, encoded, main, train, train_tokenizer, windows

COMMITTED = Path(corpus.__file__).parent / "tiny-stories"
TINY = Recipe(
    documents=300,
    held_out_documents=10,
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
    batch=2,
    peak_rate=1e-2,
    warmup_steps=5,
    checkpoint_every=10,
)
LOSS_OF_CHANCE = float(np.log(TINY.vocab))


def expected_tensors(config: dict) -> dict[str, list[int]]:
    """Names and shapes as `transformers` writes a Llama with these figures and a tied head."""
    width, mlp = config["hidden_size"], config["intermediate_size"]
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
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
    named = {f"model.layers.{n}.{name}.weight": shape for n in layers for name, shape in layer.items()}
    return named | {
        "model.embed_tokens.weight": [config["vocab_size"], width],
        "model.norm.weight": [width],
    }


def stored_tensors(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}
        return {name: part.get_shape() for name, part in slices.items()}


def check_folder(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert stored_tensors(folder) == expected_tensors(config)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": BOS, "eos_token_id": EOS}
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"]
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert (tokenizer.vocab_size(), tokenizer.bos_id(), tokenizer.eos_id()) == (config["vocab_size"], BOS, EOS)
    text = "Once upon a time, Lily saw a naïve 🐢.\nThe end."  # characters that only bytes can spell
    assert tokenizer.decode(tokenizer.encode(text)) == text


def run(folder: Path, budget: Budget) -> dict:
    with jax.numpy_dtype_promotion("standard"):  # optax.scale_by_adam raises a float to its int32 count
        return train(TINY, budget, 0, folder, folder.with_suffix(".work"), "the test")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_corpus_depends_on_seed_split_and_index_alone():
    assert list(corpus.documents(3, "train", 20)) == list(corpus.documents(3, "train", 40))[:20]
    assert list(corpus.documents(3, "train", 20)) != list(corpus.documents(4, "train", 20))
    assert not set(corpus.documents(3, "train", 20)) & set(corpus.documents(3, "held-out", 20))


def test_every_rule_of_the_grammar_can_be_expanded():
    grammar = corpus.parse(corpus.GRAMMAR)
    for name in [*grammar.choices, *grammar.tables]:
        for seed in range(20):
            text = corpus.Telling(grammar, random.Random(seed)).value(name)
            assert text and not re.search(r"[(){}|;]", text)


def test_stories_hold_together():
    """What was lost is what is found, with its color, by the friend who came by."""
    told = [re.search(r"I lost my (\w+) (.+?),\" said (\w+)\.", text) for text in corpus.documents(0, "train", 400)]
    stories = [match for match in told if match]
    assert len(stories) > 10
    for match in stories:
        color, toy, hero = match.groups()
        assert f"{hero} took " in match.string and f" {color} {toy} to the " in match.string
        assert f"saw something {color}. It was the {toy}!" in match.string


def test_sums_are_right():
    rng = random.Random(0)
    for first, sign, second, result in re.findall(r"Answer: (\d+) ([+-]) (\d+) = (\d+)\.", corpus.sums(rng) * 50):
        assert int(result) == (int(first) + int(second) if sign == "+" else int(first) - int(second))


@pytest.mark.parametrize(("text", "message"), [("a b =\n  one", "1 cells"), ("a\n  one", "begins no rule")])
def test_a_broken_grammar_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        corpus.parse(text)


def test_windows_begin_with_a_document_and_depend_on_their_key_alone():
    stream = np.concatenate(encoded(train_tokenizer(TINY, 0), corpus.documents(0, "train", 100)))
    assert stream[0] == BOS and stream[-1] == EOS and np.sum(stream == BOS) == np.sum(stream == EOS) == 100
    starts = np.flatnonzero(stream == BOS)
    drawn = [windows(stream, starts, 3, 64, (0, step)) for step in range(8)]
    assert all(window.shape == (3, 65) and (window[:, 0] == BOS).all() for window in drawn)
    np.testing.assert_array_equal(windows(stream, starts, 3, 64, (0, 5)), drawn[5])
    assert not (drawn[5] == drawn[6]).all() and not (drawn[5] == windows(stream, starts, 3, 64, (1, 5))).all()


def test_a_document_alone_does_not_see_the_one_before_it():
    model = jax.jit(Llama(TINY, nnx.Rngs(0)).__call__)
    tokens = jnp.array([[BOS, 300, 301, EOS, BOS, 302, 303], [BOS, 400, 401, EOS, BOS, 302, 303]])
    alone, together = (np.asarray(model(tokens, jnp.array(flag))[:, 4:]) for flag in (True, False))
    np.testing.assert_array_equal(alone[0], alone[1])
    assert np.abs(together[0] - together[1]).max() > 1e-4


def test_training_learns_writes_a_folder_and_repeats_itself(tmp_path: Path):
    account = run(tmp_path / "whole", Budget(35, 0.0))
    check_folder(tmp_path / "whole")
    assert account == json.loads((tmp_path / "whole" / "training.json").read_text())
    assert account["tokens_seen"] == TINY.batch * (32 * TINY.short_context + 3 * TINY.context)
    assert account["held_out_loss"] < LOSS_OF_CHANCE - 0.8

    # Going on from step 30, which the work folder holds, and starting afresh give the same weights, bit for bit.
    before = weights(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "whole.work" / "steps").iterdir()] == ["30"]
    for name in ("whole", "fresh"):
        run(tmp_path / name, Budget(35, 0.0))
        assert weights(tmp_path / name) == before
    with pytest.raises(ValueError, match="other settings"):
        run(tmp_path / "whole", Budget(36, 0.0))


def test_the_clock_ends_a_run_given_in_minutes(tmp_path: Path):
    account = run(tmp_path / "timed", Budget(None, 0.02))
    assert account["steps"] >= 1 and account["minutes"] < 1


def test_steps_and_minutes_exclude_each_other(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--out", "x", "--steps", "1", "--minutes", "1"])
    assert "not allowed with" in capsys.readouterr().err


def test_committed_folder_is_what_its_config_demands():
    check_folder(COMMITTED)
    assert (COMMITTED / "model.safetensors").stat().st_size < 2_000_000
    account = json.loads((COMMITTED / "training.json").read_text())
    shapes = stored_tensors(COMMITTED).values()
    assert account["parameters"] == sum(int(np.prod(shape)) for shape in shapes) < 1_000_000
    assert account["held_out_loss"] < 1.0
