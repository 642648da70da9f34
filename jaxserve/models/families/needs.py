"""Parts of published architectures that no family here has, for the error that refuses them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

DELTA_RULE: Final = "layers with a recurrent state (gated delta rule)"
MAMBA: Final = "layers with a recurrent state (Mamba-2)"
INDEXED: Final = "attention to the tokens that an indexer chooses (DeepSeek sparse attention)"

NEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "CohereForCausalLM": "norms that subtract the mean, and an MLP beside attention",
        "DeepseekV32ForCausalLM": INDEXED,
        "DeepseekV4ForCausalLM": "attention to compressed tokens, and several residual streams",
        "FalconH1ForCausalLM": MAMBA,
        "Gemma4ForConditionalGeneration": "heads of two sizes, in some an embedding for each layer",
        "GlmMoeDsaForCausalLM": INDEXED,
        "GraniteMoeHybridForCausalLM": MAMBA,
        "KimiLinearForCausalLM": "layers with a recurrent state (Kimi delta attention)",
        "Lfm2ForCausalLM": "layers with a recurrent state (short convolutions)",
        "Lfm2MoeForCausalLM": "layers with a recurrent state (short convolutions)",
        "Llama4ForConditionalGeneration": "attention in chunks, and layers without a rope",
        "MiMoV2FlashForCausalLM": "layers that differ in their heads, and values of another size",
        "MllamaForConditionalGeneration": "attention to the tokens of an image",
        "NemotronHForCausalLM": MAMBA,
        "PhiMoEForCausalLM": "norms that subtract the mean, and SparseMixer routing",
        "Qwen3NextForCausalLM": DELTA_RULE,
        "Qwen3_5ForCausalLM": DELTA_RULE,
        "Qwen3_5ForConditionalGeneration": DELTA_RULE,
        "Qwen3_5MoeForCausalLM": DELTA_RULE,
        "Qwen3_5MoeForConditionalGeneration": DELTA_RULE,
    }
)
