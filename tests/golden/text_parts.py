"""Checkpoints with a vision tower around the text model of another golden case.

A whole model of transformers gets the text case's weights, and has to answer text as that case
does, up to float32 rounding. Its folder has the names of published checkpoints, or those of
transformers 5.
"""

import inspect
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Exaone4_5_Config,
    Gemma3Config,
    Glm4vConfig,
    Glm4vMoeConfig,
    Kimi_K25Config,
    Mistral3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
)

TINY_TOWER = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
EAGER = dict(dtype=torch.float32, attn_implementation="eager")
TINY_QWEN_TOWER = dict(
    depth=1, num_heads=2, patch_size=4, spatial_merge_size=1, temporal_patch_size=1
)
# Prefixes of the text model's tensors in this order: body and head.
PUBLISHED = ("language_model.model.", "language_model.lm_head.")
NEWER = ("model.language_model.", "lm_head.")
PLAIN = ("model.", "lm_head.")
NOISE = 5e-5  # of float32 on machines that differ, and of M-RoPE, which adds in another order
TOWERS = ("vision_tower.", "multi_modal_projector.", "mm_projector.", "visual.")


@dataclass(frozen=True)
class TextPart:
    """A case: the text case whose model is inside, the config around it, and the names."""

    name: str
    text: str
    whole: type[PretrainedConfig]
    fields: Mapping[str, Any]
    names: tuple[str, str]
    sections: tuple[int, ...] = ()  # of M-RoPE: pairs of a head that count time, height and width
    undeclared: tuple[str, ...] = ()  # fields that the text_config has beside those of its class
    flat: bool = False  # config.json has no text_config, as that of Qwen2.5-VL
    of_text_case: bool = False  # tensors are those of the text case's file
    published_experts: bool = False  # stacked experts are [E, in, out], as those of Qwen3-VL
    stacked_experts: bool = False  # experts are stacked [E, out, in], as those of Qwen3.5


def text_parts() -> list[TextPart]:
    siglip = SiglipVisionConfig(**TINY_TOWER, image_size=16, patch_size=8)
    pixtral = PixtralVisionConfig(**TINY_TOWER, image_size=16, patch_size=8)
    gemma = dict(
        vision_config=siglip,
        mm_tokens_per_image=1,
        **dict(image_token_index=90, boi_token_index=91, eoi_token_index=92),
    )
    mistral = dict(vision_config=pixtral, image_token_index=90, tie_word_embeddings=False)
    return [
        TextPart("gemma3_images", "gemma3_two_ropes", Gemma3Config, gemma, PUBLISHED),
        TextPart("gemma3_images_newer", "gemma3_wide_window", Gemma3Config, gemma, NEWER),
        TextPart("mistral3_images", "mistral_window", Mistral3Config, mistral, PUBLISHED),
        TextPart("mistral3_images_newer", "mistral_no_window", Mistral3Config, mistral, NEWER),
        *qwen_parts(),
        *kimi_parts(),
        *later_parts(),
    ]


def later_parts() -> list[TextPart]:
    """Models like GLM-4.1V, GLM-4.5V and EXAONE 4.5."""
    tower = {**TINY_QWEN_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = dict(hidden_size=8, intermediate_size=8, out_hidden_size=32, image_size=16)
    glm = dict(vision_config=dict(**tower, **sizes))
    sections = (1, 1, 2)
    wide = dict(vision_config=dict(**tower, **{**sizes, "out_hidden_size": 64}))
    exaone = dict(vision_config=dict(**TINY_QWEN_TOWER, **sizes))
    return [
        TextPart("glm4v", "glm4_legacy", Glm4vConfig, wide, NEWER, sections),
        TextPart(
            *("glm4v_moe", "glm4_moe_groups", Glm4vMoeConfig, glm, NEWER, sections),
            undeclared=("head_dim",),
        ),
        TextPart("exaone4_5", "exaone4_legacy", Exaone4_5_Config, exaone, NEWER),
        TextPart("glm4v_biases", "glm4_biases", Glm4vConfig, wide, NEWER, sections),
        TextPart(
            *("glm4v_moe_biases", "glm4_moe_biases", Glm4vMoeConfig, glm, NEWER, sections),
            undeclared=("head_dim",),
        ),
        TextPart("exaone4_5_no_window", "exaone4_no_window", Exaone4_5_Config, exaone, NEWER),
    ]


def kimi_parts() -> list[TextPart]:
    """Models like Kimi K2.5, whose text part is DeepSeek-V3."""
    tower = dict(
        **dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2),
        **dict(pos_emb_height=4, pos_emb_width=4, merge_kernel_size=(1, 1), patch_size=4),
    )
    # Ids beyond the vocabulary: the model replaces the tokens of images wherever they are.
    ids = dict(
        **dict(image_token_id=100, video_token_id=101),
        **dict(vision_start_token_id=102, vision_end_token_id=103),
    )
    fields = dict(**ids, vision_config=tower, projection_hidden_size=8)
    # transformers 5.24 renames the text model's layers as well when it saves such a model.
    texts = {"kimi_k25": "deepseek_v3_plain_rope", "kimi_k25_yarn": "deepseek_v3_q_lora"}
    return [
        TextPart(name, text, Kimi_K25Config, fields, PUBLISHED, of_text_case=True)
        for name, text in texts.items()
    ]


def qwen_parts() -> list[TextPart]:
    """Models with M-RoPE, whose three sections of a head all count the positions of text."""
    ids = dict(
        **dict(image_token_id=90, video_token_id=91),
        **dict(vision_start_token_id=92, vision_end_token_id=93),
    )
    v2 = dict(**ids, vision_config=dict(**TINY_QWEN_TOWER, embed_dim=8, hidden_size=32))
    sizes = dict(hidden_size=8, intermediate_size=8, out_hidden_size=32)
    v2_5 = dict(**ids, vision_config=dict(**TINY_QWEN_TOWER, **sizes))
    deep = dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
    v3 = dict(**ids, vision_config=dict(**TINY_QWEN_TOWER, **sizes, **deep))
    return [
        TextPart("qwen2_vl", "qwen2_gqa", Qwen2VLConfig, v2, PLAIN, (1, 1, 2), flat=True),
        TextPart("qwen2_vl_newer", "qwen2_tied", Qwen2VLConfig, v2, NEWER, (1, 1, 2)),
        TextPart("qwen2_5_vl", "qwen2_tied", Qwen2_5_VLConfig, v2_5, PLAIN, (1, 1, 2), flat=True),
        TextPart("qwen2_5_vl_newer", "qwen2_window", Qwen2_5_VLConfig, v2_5, NEWER, (1, 1, 2)),
        TextPart("qwen3_vl", "qwen3_gqa", Qwen3VLConfig, v3, NEWER, (2, 1, 1)),
        TextPart("qwen3_vl_yarn", "qwen3_rope_yarn", Qwen3VLConfig, v3, NEWER, (4, 2, 2)),
        TextPart(
            *("qwen3_vl_moe", "qwen3_moe_gqa", Qwen3VLMoeConfig, v3, NEWER, (2, 1, 1)),
            published_experts=True,
        ),
        TextPart(
            *("qwen3_vl_moe_newer", "qwen3_moe_mlp_only_layers", Qwen3VLMoeConfig, v3, NEWER),
            sections=(2, 1, 1),
        ),
        *qwen3_5_parts(dict(**ids, vision_config=dict(**TINY_QWEN_TOWER, **sizes, **deep))),
    ]


def qwen3_5_parts(fields: dict[str, Any]) -> list[TextPart]:
    """Models like Qwen3.5, of whose heads two pairs are rotated.

    The first one with experts has tensors for each of them, as published FP8 files do.
    """
    fields["vision_config"].pop("deepstack_visual_indexes")
    moe = ("qwen3_5_moe", Qwen3_5MoeConfig, fields, NEWER, (1, 1, 0))
    return [
        TextPart("qwen3_5_images", "qwen3_5", Qwen3_5Config, fields, NEWER, (1, 1, 0)),
        TextPart("qwen3_5_tied_images", "qwen3_5_tied", Qwen3_5Config, fields, NEWER, (1, 1, 0)),
        TextPart("qwen3_5_moe_images", *moe),
        TextPart("qwen3_5_moe_images_stacked", *moe, stacked_experts=True),
    ]


def text_config(part: TextPart, config: PretrainedConfig) -> PretrainedConfig:
    """Return the text_config of the whole model whose text model has this config."""
    if not part.sections:
        return config
    kind = part.whole.sub_configs["text_config"]
    names = [*inspect.signature(kind.__init__).parameters, *part.undeclared]
    fields = {name: getattr(config, name) for name in names if hasattr(config, name)}
    fields["rope_parameters"] = {**config.rope_parameters, "mrope_section": list(part.sections)}
    return kind(**fields)


def write_text_part(part: TextPart, folder: Path, cases: Path) -> None:
    """Write a case, and load the folder again to compare its answers with the text case's."""
    text = AutoModelForCausalLM.from_pretrained(cases / part.text, **EAGER)
    inside = AutoConfig.from_pretrained(cases / part.text)
    tied = dict(tie_word_embeddings=inside.tie_word_embeddings)
    config = part.whole(text_config=text_config(part, inside), **{**tied, **part.fields})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, **EAGER).eval()
    load_text(model, text)
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    rename(folder, part, load_file(cases / part.text / "model.safetensors"))
    if part.flat:
        flatten(folder / "config.json")
    shutil.copy(cases / part.text / "golden.npz", folder / "golden.npz")
    check(folder)
    print(f"{part.name:30} around {part.text}")


@torch.no_grad()
def load_text(model: PreTrainedModel, text: PreTrainedModel) -> None:
    """Give the text case's weights to the model around it."""
    inner = model.state_dict()
    for name, tensor in text.state_dict().items():
        own = name if name.startswith("lm_head.") else name.replace("model.", NEWER[0], 1)
        inner[own].copy_(tensor)


def rename(folder: Path, part: TextPart, text: Mapping[str, torch.Tensor]) -> None:
    """Store the text model's tensors below its prefixes, and the towers' as publishers do."""
    tensors = load_file(folder / "model.safetensors")
    if part.of_text_case:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(TOWERS)}
        tensors |= text
    renamed = {renamed_tensor(name, part.names): tensor for name, tensor in tensors.items()}
    if part.published_experts:
        for name in [name for name in renamed if ".experts." in name]:
            renamed[name] = renamed[name].transpose(1, 2).contiguous()
    if part.stacked_experts:
        renamed = stacked(renamed)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of a layer's experts in two: gate above up, and down."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        number = sum(name.startswith(f"{block}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{block}.experts.{i}.{own}_proj.weight"] for i in range(number)])
            for own in ("gate", "up", "down")
        )
        found[f"{block}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{block}.experts.down_proj"] = down
    return found


def renamed_tensor(name: str, names: tuple[str, str]) -> str:
    tower = name.removeprefix("model.")
    if tower.startswith(TOWERS):
        return f"model.{tower}" if names == NEWER else tower
    body, head = names
    for old_body, old_head in (PUBLISHED, NEWER, PLAIN):
        if name.startswith(old_head):
            return head + name.removeprefix(old_head)
        if name.startswith(old_body):
            return body + name.removeprefix(old_body)
    raise SystemExit(f"{name} is neither of the text model nor of a tower")


def flatten(path: Path) -> None:
    """Write config.json as it is published: the text model's fields beside those of the whole."""
    fields = json.loads(path.read_text())
    text = fields.pop("text_config")
    figures = text.pop("rope_parameters")
    scaling = dict(type="mrope", mrope_section=figures["mrope_section"])
    late = {"architectures", "model_type", "dtype", "layer_types", "transformers_version"}
    fields |= {name: value for name, value in text.items() if name not in late}
    fields |= dict(rope_theta=figures["rope_theta"], rope_scaling=scaling, vision_token_id=94)
    fields |= dict(torch_dtype=fields.pop("dtype"), sliding_window=128)
    path.write_text(json.dumps(dict(sorted(fields.items())), indent=2) + "\n")


@torch.no_grad()
def check(folder: Path) -> None:
    """Compare the answers of the whole model in the folder with its golden.npz."""
    model = AutoModelForImageTextToText.from_pretrained(folder, **EAGER).eval()
    golden = np.load(folder / "golden.npz")
    prompts = torch.from_numpy(golden["prompts"]).long()
    out = model(input_ids=prompts, use_cache=True)
    differences = [distance(out.logits, golden["prompt_logits"])]
    for step in range(golden["tokens"].shape[1]):
        token = torch.from_numpy(golden["tokens"][:, step : step + 1]).long()
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        differences.append(distance(out.logits[:, 0], golden["decode_logits"][:, step]))
    if max(differences) > NOISE:
        raise SystemExit(
            f"{folder.name}: the whole model answers other than its text part, by "
            f"{max(differences):.1e}"
        )


def distance(logits: torch.Tensor, golden: np.ndarray) -> float:
    return (logits - torch.from_numpy(golden)).abs().max().item()
