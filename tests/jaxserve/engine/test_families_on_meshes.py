"""Engines of every family over meshes give the answers of transformers.

Prompts come in chunks, prefixes are shared, and sequences are preempted.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.config import EngineOptions
from jaxserve.engine.build import plan_config
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.loading.spec import read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import Outcome, run
from tests.jaxserve.loading.loaded import load_params

GOLDEN = Path(__file__).parents[2] / "golden"
BOUND = 1e-4  # of log-probabilities; each golden token was chosen by a gap of 5e-3 or more
FAMILIES = {
    "Llama": "llama_gqa",
    "Mistral": "mistral_window",
    "Mistral 3": "mistral3_images",
    "Ministral": "ministral_layer_types",
    "Ministral 3": "ministral3_gqa",
    "Qwen2": "qwen2_gqa",
    "Qwen3": "qwen3_head_dim",
    "Gemma": "gemma_biases",
    "Gemma 2": "gemma2_caps",
    "Gemma 3": "gemma3_two_ropes",
    "Gemma 3 with images": "gemma3_images",
    "Phi-3": "phi3_mha_tied",
    "OLMo 2": "olmo2_mha_tied",
    "OLMo 3": "olmo3_legacy",
    "Qwen2-VL": "qwen2_vl",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3-VL": "qwen3_vl_yarn",
    "Seed-OSS": "seed_oss_all_biases",
    "SmolLM3": "smollm3_windows",
    "Granite 3": "granite_biases",
    "ERNIE 4.5": "ernie4_5_biases",
    "EXAONE 4": "exaone4_legacy",
    "EXAONE 4.5": "exaone4_5",
    "Hunyuan": "hunyuan_biases",
    "GLM-4": "glm_legacy",
    "GLM-4-0414": "glm4_gqa",
    "GLM-4.1V": "glm4v",
    "Mixtral": "mixtral_gqa",
    "Qwen2-MoE": "qwen2_moe_shared_expert",
    "Qwen3-MoE": "qwen3_moe_gqa",
    "DeepSeek-V2": "deepseek_v2_lite",
    "DeepSeek-V3": "deepseek_v3_legacy",
    "DeepSeek-V3.2": "deepseek_v32_dense",
    "Kimi K2.5": "kimi_k25",
    "GLM-4.5": "glm4_moe_norms_biases",
    "GLM-4.5V": "glm4v_moe",
    "GLM-4.7-Flash": "glm4_moe_lite",
    "GLM-5": "glm5_dense",
    "MiniMax M2": "minimax_m2_half",
    "gpt-oss": "gpt_oss_head_dim",
    "Qwen3-VL-MoE": "qwen3_vl_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5_images",
    "Qwen3.5-MoE": "qwen3_5_moe_images_stacked",
    "LFM2": "lfm2",
    "LFM2-MoE": "lfm2_moe",
    "Granite 3-MoE": "granite_moe_biases",
    "ERNIE 4.5-MoE": "ernie4_5_moe_every_second",
    "Hunyuan-MoE": "hunyuan_moe_legacy",
}
# data, expert, tensor
MESHES = ((1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 4), (1, 4, 2), (1, 8, 1))
QUICK = {(1, 1, 2): "Gemma 3", (2, 1, 4): "Qwen3", (1, 4, 2): "Mixtral"}
# Chunks of 16 tokens; pages for one and a half of the two sequences that a lane has at a time.
OPTIONS = EngineOptions(max_batch=2, step_tokens=16, page_size=4, cache_tokens=96, max_context=60)


def cases() -> Iterator[ParameterSet]:
    """Yield all cases; `make test` runs meshes of each axis, with one family each."""
    for family, mesh in product(FAMILIES, MESHES):
        marks = [] if QUICK.get(mesh) == family else [pytest.mark.slow, pytest.mark.matrix]
        yield pytest.param(family, mesh, marks=marks, id=f"{family}-{'x'.join(map(str, mesh))}")


@pytest.mark.parametrize(("family", "mesh"), list(cases()))
def test_tokens_and_log_probabilities(family: str, mesh: tuple[int, int, int]) -> None:
    case = FAMILIES[family]
    golden = np.load(GOLDEN / case / "golden.npz")
    outcomes, runner, spec = answer_prompts(case, MeshSpec(*mesh))
    for (name, _), outcome in outcomes.items():
        check(outcome, golden, int(name) % 2)
    times = [outcome.last.times for outcome in outcomes.values() if outcome.last]
    assert sum(t.cached for t in times) >= 8 * len(times), "the later half finds its prompts' pages"
    # Pages behind a window are freed in time: a model with windows alone preempts nothing.
    if any(group.window is None for group in spec.page_groups()):
        assert sum(t.preemptions for t in times) > 0
    if spec.mixture:
        check_load(runner, spec, golden, outcomes)


def answer_prompts(
    case: str, mesh_spec: MeshSpec, weights: str = "auto"
) -> tuple[dict[tuple[str, int], Outcome], DeviceRunner, ModelSpec]:
    """Answer both prompts of the case, twice in every lane."""
    mesh = mesh_spec.build(jax.devices())
    checkpoint = HFCheckpoint.open(GOLDEN / case)
    spec = read_spec(checkpoint.config)[1].on(mesh_spec.tensor)
    params = load_params(checkpoint, mesh, "float32", weights=weights)
    options = replace(OPTIONS, max_context=min(OPTIONS.max_context, spec.max_positions))
    if spec.state:  # which is larger than these pages, and found at its whole length or not at all
        options = replace(options, snapshot_share=0.9, cache_tokens=104)
    config = plan_config(spec, params, mesh, options)
    runner = DeviceRunner(spec, params, config, mesh)
    engine = Engine(Scheduler(config, fingerprint=case), runner)
    runner.warm_up(
        [max(b for b in runner.buckets.buckets if b.kind == kind) for kind in ("decode", "prefill")]
    )
    golden = np.load(GOLDEN / case / "golden.npz")
    steps = golden["tokens"].shape[1]
    sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, logprobs=20)
    prompts = [tuple(golden["prompts"][i % 2].tolist()) for i in range(4 * mesh_spec.lanes)]
    requests = [
        Request(id=str(i), prompt=prompt, params=sampling, eos_ids=())
        for i, prompt in enumerate(prompts)
    ]
    outcomes = run(engine, [(0, request) for request in requests])
    assert runner.compiles_after_ready == 0
    return outcomes, runner, spec


def check(outcome: Outcome, golden: dict[str, np.ndarray], prompt: int) -> None:
    assert outcome.tokens == golden["tokens"][prompt].tolist()
    logits = np.concatenate(
        [golden["prompt_logits"][prompt, -1:], golden["decode_logits"][prompt, :-1]]
    )
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for entry, scores in zip(outcome.logprobs, expected, strict=True):
        ids = [token for token, _ in entry.top]
        np.testing.assert_allclose([score for _, score in entry.top], scores[ids], atol=BOUND)


def check_load(
    runner: DeviceRunner,
    spec: ModelSpec,
    golden: dict[str, np.ndarray],
    outcomes: dict[tuple[str, int], Outcome],
) -> None:
    """Check that layers processed equally many tokens, and experts only those routed to them."""
    assert spec.mixture
    load = runner.expert_load()
    assert load.shape == (len(spec.mixture.layers), spec.mixture.experts)
    computed = load.sum(1) // spec.mixture.taken
    once = len(outcomes) * (golden["prompts"].shape[1] + golden["tokens"].shape[1] - 1)
    cached = sum(outcome.last.times.cached for outcome in outcomes.values() if outcome.last)
    assert (computed == computed[0]).all() and once - cached <= computed[0]
    for layer, counts in enumerate(load):
        assert set(np.flatnonzero(counts)) == set(golden["experts"][layer, :, :-1].ravel().tolist())
