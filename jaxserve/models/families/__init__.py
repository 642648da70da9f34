"""The families that load: one explicit registry row each."""

from jaxserve.models.families import llama, qwen3
from jaxserve.models.families.family import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
}
