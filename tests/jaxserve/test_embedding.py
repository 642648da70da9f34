"""Embeddings from the library: what transformers answered, however the prompts are cut and
spread."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, EngineOptions, SamplingParams
from jaxserve.errors import (
    ConfigError,
    ContextLengthError,
    ModelError,
    NonFiniteLogitsError,
    PurposeError,
    RequestError,
)
from jaxserve.sharding.mesh import MeshSpec
from tests.embedding_model import BOUND, END, FOLDER, golden, text_of, with_tokenizer

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat-draft"
OPTIONS = EngineOptions(max_batch=4, page_size=4)
PROMPTS, EXPECTED = golden()
OTHERS = [[7], [1, 2, 3], PROMPTS[0][:9], list(range(90, 40, -1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("embedding"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, options=OPTIONS) as llm:
        yield llm
        assert not llm.engine.has_work
        llm.engine.scheduler.check_invariants()


def check(found: list[np.ndarray]) -> None:
    for embedding, expected in zip(found, EXPECTED, strict=True):
        assert embedding.dtype == np.float32 and embedding.shape == expected.shape
        np.testing.assert_allclose(embedding, expected, atol=BOUND, rtol=0)


@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 1), pytest.param((1, 1, 2), marks=pytest.mark.slow), (2, 1, 1)],
    ids=lambda mesh: "x".join(map(str, mesh)),
)
@pytest.mark.parametrize("step_tokens", [64, 16])
def test_transformers_answer(folder: Path, mesh: tuple[int, int, int], step_tokens: int) -> None:
    """Whole and in chunks, alone, again from the prefix cache, and with others beside it."""
    with LLM(
        folder, options=replace(OPTIONS, step_tokens=step_tokens), mesh=MeshSpec(*mesh)
    ) as llm:
        check(llm.embed(PROMPTS))
        before = llm.runner.total.live_tokens
        check(llm.embed(PROMPTS))
        assert llm.runner.total.live_tokens - before < sum(map(len, PROMPTS)) / 2, (
            "no page was found again"
        )
        check(llm.embed([*OTHERS, *PROMPTS])[len(OTHERS) :])
        assert {bucket.kind for bucket in llm.runner.padding} == {"embed"}
        assert llm.runner.compiles_after_ready == 0


def test_deterministic_bits_whatever_the_load(folder: Path) -> None:
    options = replace(OPTIONS, max_batch=8, step_tokens=32, deterministic=True)
    with LLM(folder, options=options) as llm:
        alone = llm.embed(PROMPTS[:1])
        together = llm.embed([*OTHERS, *PROMPTS])
        check(together[len(OTHERS) :])
        assert alone[0].tobytes() == together[len(OTHERS)].tobytes()
        assert [e.tobytes() for e in llm.embed(PROMPTS[::-1])] == [
            e.tobytes() for e in together[:-3:-1]
        ]


def test_texts_end_as_the_tokenizer_says(llm: LLM) -> None:
    ids = [5, 17, 40]
    of_text, of_ids, without_end = llm.embed([text_of(ids), [*ids, END], ids])
    assert of_text.tobytes() == of_ids.tobytes() != without_end.tobytes()
    assert llm.embed([""])[0].tobytes() == llm.embed([[END]])[0].tobytes()
    assert llm.embed([]) == []
    np.testing.assert_allclose(np.linalg.norm(of_text), 1, rtol=1e-6)


def test_bfloat16(folder: Path) -> None:
    with LLM(folder, dtype="bfloat16", options=OPTIONS) as llm:
        for embedding, expected in zip(llm.embed(PROMPTS), EXPECTED, strict=True):
            assert embedding.dtype == np.float32 and embedding @ expected > 0.999


def test_the_longest_prompt(folder: Path) -> None:
    with LLM(folder, options=replace(OPTIONS, max_context=16, step_tokens=16)) as llm:
        assert llm.embed([PROMPTS[0][:16]])[0].shape == EXPECTED[0].shape
        with pytest.raises(
            ContextLengthError, match=r"prompts\[1\]: 24 tokens exceed the context of 16"
        ):
            llm.embed([[1], PROMPTS[0]])


def test_a_single_text_needs_no_list(llm: LLM) -> None:
    (alone,) = llm.embed("w1")
    (listed,) = llm.embed(["w1"])
    assert np.array_equal(alone, listed)


def test_what_is_no_prompt(llm: LLM) -> None:
    for prompts, message in (
        ([[]], r"prompts\[0\] has no tokens"),
        ([[1], [96]], r"prompts\[1\] has 96 as entry 0"),
        ([[{"role": "user", "content": "w1"}]], r"prompts\[0\] is a conversation"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.embed(prompts)  # type: ignore[arg-type]


def test_a_model_that_embeds_generates_nothing(llm: LLM) -> None:
    for call in (
        lambda: llm.generate(["w1"]),
        lambda: llm.chat([{"role": "user", "content": "w1"}]),
        lambda: llm.stream("w1"),
        lambda: llm.prepare("w1", SamplingParams()),
    ):
        with pytest.raises(PurposeError, match="this model makes embeddings and generates no text"):
            call()


def test_a_model_that_generates_does_not_embed() -> None:
    with (
        LLM(BUNDLED, options=OPTIONS) as llm,
        pytest.raises(PurposeError, match="this model generates text and makes no embeddings"),
    ):
        llm.embed(["Once"])


def test_without_the_files_of_sentence_transformers_it_generates(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path)
    (folder / "modules.json").unlink()
    with LLM(folder, options=OPTIONS) as llm:
        (done,) = llm.generate(
            [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
        assert list(done.token_ids) == np.load(FOLDER / "golden.npz")["tokens"][0, :8].tolist()


@pytest.mark.parametrize("stored", [False, True])
def test_a_head_is_not_needed(tmp_path: Path, stored: bool) -> None:
    """Not tied and not there, as of Qwen3-Embedding-8B; or there, and left alone."""
    folder = with_tokenizer(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    if stored:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            tensors | {"lm_head.weight": np.zeros((96, 32), np.float32)},
            folder / "model.safetensors",
        )
    with LLM(folder, options=OPTIONS) as llm:
        check(llm.embed(PROMPTS))
        assert "head" not in llm.model.params
        assert llm.model.parameters == sum(leaf.size for leaf in jax.tree.leaves(llm.model.params))


def test_without_modules_a_head_that_is_not_tied_is_missed(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path)
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"lacks 1 tensors: lm_head\.weight"):
        LLM(folder, options=OPTIONS)


def test_values_that_are_not_finite_are_an_error(folder: Path) -> None:
    """Only the prompt with the damaged token fails; later prompts are embedded as usual."""
    with LLM(folder, options=OPTIONS) as llm:
        llm.model.params["embed"] = llm.model.params["embed"].at[95].set(jnp.nan)
        with pytest.raises(
            NonFiniteLogitsError, match="the values after 3 tokens are NaN or infinite"
        ):
            llm.embed([PROMPTS[0], [1, 95, 2]])
        check(llm.embed(PROMPTS))


def test_an_option_without_a_meaning(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="--decode-steps is 2; a model that embeds decodes nothing"
    ):
        LLM(folder, options=replace(OPTIONS, decode_steps=2))
