"""Checkpoints with a vision tower around the text model of another golden case.

A whole model of transformers gets the text case's weights, and has to answer text as that case
does, to the bit. Its folder has the names of published checkpoints, or those of transformers 5.
"""

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
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

TINY_TOWER = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
EAGER = dict(dtype=torch.float32, attn_implementation="eager")
# Prefixes of the text model's tensors in this order: body and head.
PUBLISHED = ("language_model.model.", "language_model.lm_head.")
NEWER = ("model.language_model.", "lm_head.")


@dataclass(frozen=True)
class TextPart:
    """A case: the text case whose model is inside, the config around it, and the names."""

    name: str
    text: str
    whole: type[PretrainedConfig]
    fields: Mapping[str, Any]
    names: tuple[str, str]


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
    ]


def write_text_part(part: TextPart, folder: Path, cases: Path) -> None:
    """Write a case, and load the folder again to compare its answers with the text case's."""
    text = load_file(cases / part.text / "model.safetensors")
    config = part.whole(text_config=AutoConfig.from_pretrained(cases / part.text), **part.fields)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, **EAGER).eval()
    load_text(model, text)
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    rename(folder, part.names)
    shutil.copy(cases / part.text / "golden.npz", folder / "golden.npz")
    check(folder)
    print(f"{part.name:30} around {part.text}")


@torch.no_grad()
def load_text(model: PreTrainedModel, text: Mapping[str, torch.Tensor]) -> None:
    """Give the text case's weights to the model around it."""
    inner = dict(model.named_parameters())
    for name, tensor in text.items():
        own = name if name.startswith("lm_head.") else name.replace("model.", NEWER[0], 1)
        inner[own].copy_(tensor)


def rename(folder: Path, names: tuple[str, str]) -> None:
    """Store the text model's tensors below these prefixes, and the towers' without `model.`."""
    body, head = names
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old_body, old_head in (PUBLISHED, NEWER):
            if name.startswith(old_head):
                name = head + name.removeprefix(old_head)
                break
            if name.startswith(old_body):
                name = body + name.removeprefix(old_body)
                break
        else:
            name = name.removeprefix("model.")
            name = f"model.{name}" if names == NEWER else name
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def check(folder: Path) -> None:
    """Compare the answers of the whole model in the folder with its golden.npz."""
    model = AutoModelForImageTextToText.from_pretrained(folder, **EAGER).eval()
    golden = np.load(folder / "golden.npz")
    prompts = torch.from_numpy(golden["prompts"]).long()
    out = model(input_ids=prompts, use_cache=True)
    same = torch.equal(out.logits, torch.from_numpy(golden["prompt_logits"]))
    for step in range(golden["tokens"].shape[1]):
        token = torch.from_numpy(golden["tokens"][:, step : step + 1]).long()
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        same &= torch.equal(out.logits[:, 0], torch.from_numpy(golden["decode_logits"][:, step]))
    if not same:
        raise SystemExit(f"{folder.name}: the whole model answers other than its text part")
