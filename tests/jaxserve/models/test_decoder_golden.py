"""The decoder against transformers: every golden checkpoint, prompt and 32 decode steps."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.models.decoder_harness import Decoder, one_device_mesh
from tests.slow_cases import slow_but

GOLDEN = Path(__file__).parents[2] / "golden"
BOUND = 1e-4
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
MIXTURES = [case for case in CASES if "experts" in np.load(GOLDEN / case / "golden.npz")]


def test_the_cases_are_there() -> None:
    assert (len(CASES), len(MIXTURES)) == (149, 58)


# Of the families that have a mechanism of their own, the case that has most of it.
OF_EACH_MECHANISM = (
    *("llama_gqa", "llama_tied", "mistral_window", "qwen2_gqa", "qwen3_gqa", "gemma2_caps"),
    *("gemma3_two_ropes", "phi3_longrope", "olmo2_gqa", "ministral3_gqa", "gemma3_images"),
    *("mistral3_images_newer", "glm4_moe_norms_biases", "minimax_m2_half", "mixtral_gqa"),
    *("qwen2_moe_shared_expert", "qwen3_moe_mlp_only_layers", "deepseek_v2_groups"),
    *("deepseek_v3_fp8", "glm4_moe_lite", "gpt_oss_mxfp4", "qwen2_5_vl", "qwen3_vl_moe"),
    *("smollm3_windows", "olmo3_legacy", "granite_moe_biases", "ernie4_5_moe_every_second"),
    *("hunyuan_moe_legacy", "glm4_gqa", "ministral3_fp8", "deepseek_v32_dense"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe_images_stacked", "lfm2", "lfm2_moe"),
)


@pytest.mark.parametrize("case", slow_but(CASES, OF_EACH_MECHANISM))
def test_logits(case: str) -> None:
    check_logits(case, one_device_mesh())


OVER_TWO = (
    *(
        "llama_gqa",
        "llama_mlp_bias",
        "mistral_window",
        "qwen2_gqa",
        "qwen3_head_dim",
        "gemma2_caps",
    ),
    *("gemma3_two_ropes", "phi3_mha_tied", "olmo2_mha_tied", "ministral3_tied_window"),
    *("gemma3_images", "glm4_moe_norms_biases", "minimax_m2_half"),
    *("mixtral_gqa", "qwen2_moe_sparse_step", "qwen3_moe_mlp_only_layers", "deepseek_v2_groups"),
    *("deepseek_v3_fp8", "glm4_moe_lite", "gpt_oss_head_dim", "gpt_oss_mxfp4", "qwen2_5_vl"),
    *("qwen3_vl_yarn", "qwen3_vl_moe", "seed_oss_all_biases", "smollm3_windows", "olmo3_legacy"),
    *("granite_biases", "granite_moe_biases", "ernie4_5_biases", "ernie4_5_moe_every_second"),
    *(
        "exaone4_legacy",
        "hunyuan_biases",
        "hunyuan_moe_legacy",
        "glm_mqa",
        "glm4_gqa",
        "gemma_legacy",
    ),
    *("qwen3_next", "qwen3_next_legacy", "qwen3_5", "qwen3_5_moe_images"),
    *("lfm2_legacy", "lfm2_moe"),
)


@pytest.mark.parametrize(
    "case",
    slow_but(
        OVER_TWO,
        ("deepseek_v3_fp8", "qwen3_5"),
    ),
)
def test_logits_over_two_devices(case: str) -> None:
    """Every family runs, whatever two devices split of it."""
    check_logits(case, MeshSpec(tensor=2).build(jax.devices()))


@pytest.mark.parametrize(
    "case",
    slow_but(
        ("llama_mqa", "qwen2_gqa", "olmo2_gqa", "phi3_window", "glm_mqa", "glm4_gqa", "qwen3_5"),
        ("phi3_window", "glm4_gqa"),
    ),
)
def test_logits_where_kv_heads_are_fewer_than_devices(case: str) -> None:
    """Four devices have one or two kv heads and four query heads.

    The cases have biases, norms of all heads, a fused tensor, rotated pairs beside each other, and
    gates behind attention.
    """
    check_logits(case, MeshSpec(tensor=4).build(jax.devices()))


IN_BFLOAT16 = (
    *(
        "llama_gqa",
        "mistral_window",
        "qwen2_gqa",
        "qwen3_gqa",
        "gemma2_caps",
        "gemma3_two_ropes",
        "phi3_longrope",
        "ministral3_gqa",
    ),
    *(
        "glm4_moe_norms_biases",
        "minimax_m2_half",
        "olmo2_gqa",
        "mixtral_gqa",
        "qwen2_moe_shared_expert",
        "qwen3_moe_gqa",
        "deepseek_v2_groups",
    ),
    *("deepseek_v3_fp8", "glm4_moe_lite", "gpt_oss_mxfp4", "qwen2_5_vl", "qwen3_vl_yarn"),
    *("qwen3_vl_moe", "seed_oss_all_biases", "smollm3_windows", "olmo3_legacy", "granite_biases"),
    *("granite_moe_biases", "ernie4_5_biases", "ernie4_5_moe_every_second", "exaone4_legacy"),
    *("hunyuan_biases", "hunyuan_moe_legacy", "glm_mqa", "glm4_gqa"),
    *("gemma_legacy", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
)


@pytest.mark.parametrize("case", slow_but(IN_BFLOAT16, ("mixtral_gqa", "qwen3_5")))
def test_logits_in_bfloat16(case: str) -> None:
    """The median error of logits, which spread by 2, is small.

    A token that rounding sends to other experts has a larger error.
    """
    golden = np.load(GOLDEN / case / "golden.npz")
    prompts = golden["prompts"]
    tokens = golden["tokens"]
    decoder = Decoder(
        GOLDEN / case, one_device_mesh(), rows=2, context=64, page_size=8, dtype="bfloat16"
    )
    assert np.median(np.abs(decoder(prompts, 0) - golden["prompt_logits"])) < 0.1
    decoded = decoder(tokens[:, :1], prompts.shape[1])[:, 0]
    assert np.median(np.abs(decoded - golden["decode_logits"][:, 0])) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXTURES)
def test_every_token_goes_to_the_same_experts(case: str) -> None:
    """Experts are compared token by token, by the change of their load."""
    golden = np.load(GOLDEN / case / "golden.npz")
    tokens = np.concatenate([golden["prompts"], golden["tokens"]], axis=1)[1]
    decoder = Decoder(GOLDEN / case, one_device_mesh(), rows=1, context=64, page_size=8)
    for position, token in enumerate(tokens):
        decoder(np.array([[token]]), position)
        taken = [np.flatnonzero(layer).tolist() for layer in np.asarray(decoder.load)[0]]
        assert taken == [sorted(layer) for layer in golden["experts"][:, 1, position].tolist()], (
            position
        )


def check_logits(case: str, mesh: Mesh) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    prompts = golden["prompts"]
    tokens = golden["tokens"]
    decoder = Decoder(GOLDEN / case, mesh, rows=2, context=64, page_size=8)
    # Two chunks of one size, which one program computes; their border lies inside a page of 8.
    first = prompts[:, :12]
    second = prompts[:, 12:]
    in_chunks = np.concatenate([decoder(first, 0), decoder(second, 12)], axis=1)
    np.testing.assert_allclose(in_chunks, golden["prompt_logits"], atol=BOUND)
    check_load(decoder, golden, slice(12, prompts.shape[1]))
    for i in range(tokens.shape[1]):
        position = prompts.shape[1] + i
        logits = decoder(tokens[:, i : i + 1], position)[:, 0]
        np.testing.assert_allclose(logits, golden["decode_logits"][:, i], atol=BOUND)
        check_load(decoder, golden, slice(position, position + 1))
        if i + 1 < tokens.shape[1]:
            assert logits.argmax(-1).tolist() == tokens[:, i + 1].tolist()


def check_load(decoder: Decoder, golden: Mapping[str, np.ndarray], positions: slice) -> None:
    """Compare how many of the tokens at these positions each expert took; dense models have none.

    golden["experts"]: [layers, rows, positions, experts taken].
    """
    if "experts" not in golden:
        return
    load = np.asarray(decoder.load).sum(0)
    for layer, taken in zip(load, golden["experts"][:, :, positions], strict=True):
        assert layer.tolist() == np.bincount(taken.ravel(), minlength=len(layer)).tolist()


@pytest.mark.parametrize("case", sorted(json.loads((GOLDEN / "rope.json").read_text())))
def test_rope_frequencies(case: str) -> None:
    golden = json.loads((GOLDEN / "rope.json").read_text())[case]
    config = golden["config"]
    rope = ConfigReader(config).rope(default_theta=10000.0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    np.testing.assert_allclose(rope.inverse_frequencies(head_dim), golden["inv_freq"], rtol=2e-6)
    assert rope.attention_factor == pytest.approx(golden["attention_scaling"], rel=1e-9)
