"""The families that load: one explicit registry row each."""

from jaxserve.models.families import (
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from jaxserve.models.families.family import Family

FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}
