"""Draft models: the bundled pair, and checkpoints that are refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import jax
import pytest

from jaxserve.cli.flags import EngineFlags, draft_model_of
from jaxserve.cluster.hosts import HostOptions
from jaxserve.config import EngineOptions
from jaxserve.errors import ConfigError
from jaxserve.generate.__main__ import main
from jaxserve.llm import LLM
from jaxserve.loading.draft import check_tokens
from jaxserve.sampling_params import SamplingParams
from tests.byte_tokenizer import ByteTokenizer

FOLDER = Path(__file__).parents[3] / "checkpoints" / "bundled"
MODEL = FOLDER / "tiny-chat"
DRAFT = FOLDER / "tiny-chat-draft"
OPTIONS = EngineOptions(
    max_batch=2, step_tokens=16, page_size=16, cache_tokens=1024, max_context=256
)
SPECULATING = replace(OPTIONS, speculate="draft", draft_tokens=3)
PROMPTS = ["Once upon a time", "The dragon", "Tom and his dog", "One day, a girl named Lily"]
PARAMS = [SamplingParams(max_tokens=60, temperature=t, seed=7) for t in (0.0, 0.0, 0.7, 1.0)]


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "jaxserve.engine.engine.Engine.set_step_costs", lambda *_: None
        )  # costs unknown: everything is tried
        with LLM(MODEL, dtype="float32", options=SPECULATING, draft_model=DRAFT) as llm:
            yield llm


@pytest.mark.slow
def test_the_bundled_pair_says_what_the_model_says(pair: LLM) -> None:
    with LLM(MODEL, dtype="float32", options=OPTIONS) as alone:
        expected = [c.token_ids for c in alone.generate(PROMPTS, PARAMS)]
    for _ in range(2):  # prompts are cached the second time
        found = pair.generate(PROMPTS, PARAMS)
        assert [c.token_ids for c in found] == expected
    drafted, accepted = (
        sum(getattr(c.timings, f"{n}_tokens") for c in found) for n in ("drafted", "accepted")
    )
    assert drafted > 100 and accepted > drafted / 2


def test_generate_says_what_the_draft_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--max-batch",
        "1",
        "--step-tokens",
        "16",
        "--page-size",
        "16",
        "--cache-tokens",
        "512",
    ]
    draft = [
        "--speculate",
        "draft",
        "--draft-model",
        str(DRAFT),
        "--draft-tokens",
        "1",
        "--temperature",
        "0",
    ]
    cache = ["--compilation-cache", str(jax.config.jax_compilation_cache_dir)]
    assert (
        main(
            [
                "--model",
                str(DRAFT),
                "--prompt",
                PROMPTS[0],
                "--max-tokens",
                "90",
                *sizes,
                *draft,
                *cache,
                "-v",
            ]
        )
        == 0
    )
    assert "draft model 781.31 KiB on each device" in capsys.readouterr().err.replace("\n", " ")


def test_weights_and_pages_of_the_draft_model_are_counted(pair: LLM) -> None:
    """The draft model's pages are counted beside the model's, under the same page numbers.

    They have three layers, K and V, 2 heads of 16, and float32.
    """
    state = pair.runner.lowering.state
    config = pair.runner.config
    pages = jax.tree.leaves(state.drafter)
    assert (
        sum(leaf.size for leaf in pages)
        == 3 * 2 * 2 * 16 * config.pools[0].pages * config.page_size
    )
    assert pair.draft and pair.draft.parameters < pair.model.parameters / 5


@pytest.mark.parametrize(
    ("options", "draft", "message"),
    [
        (SPECULATING, None, "--speculate is draft; there is no draft model"),
        (OPTIONS, DRAFT, "drafts nothing without --speculate draft"),
        (replace(OPTIONS, speculate="ngram"), DRAFT, "drafts nothing without --speculate draft"),
        (
            replace(SPECULATING, deterministic=True),
            DRAFT,
            "--speculate is draft; --deterministic runs one kind of decode",
        ),
    ],
)
def test_choices_that_contradict_each_other(
    options: EngineOptions, draft: Path | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(DRAFT, options=options, draft_model=draft)


def test_several_hosts_are_refused() -> None:
    engine = EngineFlags(draft_model=DRAFT)
    with pytest.raises(ConfigError, match="draft models are not built in for several hosts"):
        draft_model_of(engine, HostOptions(hosts=2))


class Larger(ByteTokenizer):
    vocab_size = 300


class Other(ByteTokenizer):
    def token_text(self, token_id: int) -> str:
        return "é" if token_id == 70 else super().token_text(token_id)


class Special(ByteTokenizer):
    """A tokenizer whose token 65 is special."""

    special_tokens = MappingProxyType({"A": 65, "<bos>": 256, "<eos>": 257})

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        return (b"", opening) if token_id == 65 else super().token_bytes(token_id, opening)


def test_the_first_token_that_is_another_one_is_named() -> None:
    check_tokens(DRAFT, ByteTokenizer(), ByteTokenizer())
    check_tokens(DRAFT, Larger(), ByteTokenizer())
    check_tokens(DRAFT, ByteTokenizer(), Larger())
    with pytest.raises(ConfigError, match="token 70 is 'é', and 'F' in the model"):
        check_tokens(DRAFT, Other(), ByteTokenizer())
    with pytest.raises(ConfigError, match="token 65 is 'A', and the special 'A' in the model"):
        check_tokens(DRAFT, ByteTokenizer(), Special())
