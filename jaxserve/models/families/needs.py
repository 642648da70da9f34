"""Parts of published models that no family here has, for the error that refuses them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MAMBA: Final = "layers with a recurrent state (Mamba-2)"
FAMILY_FILE: Final = "only a family file (docs/adding-a-model.md)"
TWO_SIZES: Final = "heads of two sizes, in some an embedding for each layer"
BLOCKS: Final = "attention to the blocks of tokens that an indexer chooses"

NEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ChatGLMModel": "the same model in the form of transformers (its name ends in -hf)",
        "CohereForCausalLM": "norms that subtract the mean, and an MLP beside attention",
        "DeepseekV4ForCausalLM": "attention to compressed tokens, and several residual streams",
        "Ernie4_5_VLMoeForConditionalGeneration": "experts for text apart from those for images",
        "ExaoneForCausalLM": FAMILY_FILE,
        "FalconH1ForCausalLM": MAMBA,
        "Gemma4ForConditionalGeneration": TWO_SIZES,
        "Gemma4UnifiedForConditionalGeneration": TWO_SIZES,
        "GraniteMoeHybridForCausalLM": MAMBA,
        "InternLM2ForCausalLM": FAMILY_FILE,
        "KimiK3ForConditionalGeneration": "layers with a recurrent state (Kimi delta attention)",
        "KimiLinearForCausalLM": "layers with a recurrent state (Kimi delta attention)",
        "LagunaForCausalLM": "layers that differ in their heads, and gates behind attention",
        "Llama4ForConditionalGeneration": "attention in chunks, and layers without a rope",
        "MiMoForCausalLM": FAMILY_FILE,
        "MiMoV2FlashForCausalLM": "layers that differ in their heads, and values of another size",
        "MiniCPM3ForCausalLM": FAMILY_FILE,
        "MiniCPMForCausalLM": FAMILY_FILE,
        "MiniMaxM3SparseForConditionalGeneration": BLOCKS,
        "MllamaForConditionalGeneration": "attention to the tokens of an image",
        "MuseGlimmerForConditionalGeneration": "gates behind attention, and norms without weights",
        "NemotronHForCausalLM": MAMBA,
        "PhiMoEForCausalLM": "norms that subtract the mean, and SparseMixer routing",
    }
)
# The same of text parts, by the model_type of text_config.
TEXTS_NEED: Final[Mapping[str, str]] = MappingProxyType(
    {"mistral4": "latent attention whose queries grow with their position"}
)
