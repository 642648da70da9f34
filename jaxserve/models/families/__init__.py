"""Registry of the model families that are supported, by the name of their architecture."""

from jaxserve.models.families import (
    deepseek,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from jaxserve.models.families.weight_table import Family

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek.V2,
    "DeepseekV3ForCausalLM": deepseek.V3,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.WITH_IMAGES,
    "Glm4MoeForCausalLM": glm4_moe.FAMILY,
    "GptOssForCausalLM": gpt_oss.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "MiniMaxM2ForCausalLM": minimax_m2.FAMILY,
    "Ministral3ForCausalLM": ministral3.FAMILY,
    "Mistral3ForConditionalGeneration": mistral.WITH_IMAGES,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}
