"""Types of 64 bits, which a program around the engine may have switched on, change nothing.

JAX_ENABLE_X64, jax_enable_x64 and jax.enable_x64 make numbers without a dtype 64 bits wide.
Origins: openxla/tokamax#1349 and jax-ml/jax#18847, kernels that fail then. Right are the answers
without.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, EngineOptions
from jaxserve.engine.device.lowering import Lowering
from jaxserve.structure import Structure
from tests.jaxserve.engine.tiny import (
    BASE,
    EXPERTS,
    LATENT,
    SPEC,
    WINDOWED,
    largest_of_each_kind,
    make_engine,
)
from tests.slow_cases import slow_but

MODEL = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat-draft"
STORY = "Once upon a time"


def texts_of(lowering: Lowering, buckets: list) -> list[str]:
    """Return the text of all programs of an engine."""
    writers = lowering.writers().values()
    pages = lowering.page_programs().values()
    lowered = [*map(lowering.step, buckets), *writers, *pages]
    return [program.as_text() for program in lowered]


@pytest.mark.parametrize("spec", slow_but([SPEC, WINDOWED, EXPERTS, LATENT], [EXPERTS]))
def test_steps_are_the_same(spec) -> None:
    """Also where the engine is made with the switch on."""
    options = replace(BASE, page_exchange=True, speculate="ngram")
    engine, runner = make_engine(options, spec=spec)
    buckets = largest_of_each_kind(runner)
    narrow = texts_of(runner.lowering, buckets)
    with jax.enable_x64(True):
        assert texts_of(runner.lowering, buckets) == narrow
        wide_engine, wide = make_engine(options, spec=spec)
        assert texts_of(wide.lowering, buckets) == narrow
        wide_engine.close()
    engine.close()
    assert not any("f64" in text for text in narrow)


def new_llm() -> LLM:
    """Return a model whose weights are quantized while it is loaded."""
    options = EngineOptions(max_batch=2, step_tokens=16, page_size=16, max_context=64)
    return LLM(MODEL, weights="int8", options=options, progress=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with new_llm() as llm:
        yield llm


def answers(llm: LLM) -> list[tuple]:
    """Return what a call answers, with everything that requests can ask for."""
    done = llm.generate(
        [STORY, "2+3="],
        top_p=0.9,
        seed=5,
        n=2,
        logprobs=2,
        max_tokens=12,
        temperature=0.7,
        frequency_penalty=0.5,
        logit_bias={300: 2.0},
        prompt_logprobs=1,
        structure=Structure.of("regex", "[a-z ]{4,9}"),
    )
    return [(d.token_ids, d.logprobs, d.prompt_logprobs) for d in done]


def test_a_model_answers_the_same(llm: LLM) -> None:
    narrow = answers(llm)
    with jax.enable_x64(True):
        with new_llm() as wide:
            assert answers(wide) == narrow
        assert jnp.arange(2).dtype == np.int64, "the program's own numbers stay as they were"


@pytest.mark.system
def test_a_command_answers_the_same(llm: LLM) -> None:
    (narrow,) = llm.generate([STORY], temperature=0.7, seed=3, max_tokens=12)
    flags = "--weights int8 --max-context 64 --max-batch 1 --json"
    asked = ["--prompt", STORY, "--temperature", "0.7", "--seed", "3", "--max-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.generate", str(MODEL), *flags.split(), *asked],
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert tuple(json.loads(done.stdout)["token_ids"]) == narrow.token_ids
