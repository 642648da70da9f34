"""Text parts of checkpoints that also have towers, which read images or video.

Such a config.json has the fields of the language model in text_config. The towers are left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.needs import TEXTS_NEED
from jaxserve.models.families.typed_fields import in_config
from jaxserve.models.families.weight_table import Family
from jaxserve.models.spec import ModelSpec

TEXT: str = "text_config"


def text_part(
    texts: Mapping[str, Family],
    towers: tuple[str, ...],
    *fields: str,
    flat: str = "",
    ties_inside: bool = False,
) -> Family:
    """Return the family of checkpoints with such a text part.

    Args:
        texts: Families that the text part may be of, by its model_type. They have one weight table
            in common.
        towers: Names of the blocks of tensors that are left out.
        *fields: Fields of config.json, beside vision_config, that those blocks alone use.
        flat: The model_type of the text part of a config.json without text_config, which has the
            text part's fields itself; empty for families that always have a text_config.
        ties_inside: Whether text_config may tie the head where config.json has false for it, as
            files of transformers before version 5.
    """
    table = next(iter(texts.values()))

    def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
        if flat and TEXT not in config:
            outside = {"vision_config", *fields}
            text = {name: value for name, value in config.items() if name not in outside}
            return texts[flat].spec_from_hf(text)
        read = ConfigReader(config)
        read.ignore("vision_config", *fields)
        text = dict(read.object(TEXT))
        kind = text.get("model_type")
        if not isinstance(kind, str) or kind not in texts:
            needs = TEXTS_NEED.get(str(kind))
            raise ModelError(
                f"config.json: model_type of {TEXT} is {kind!r} (implemented: {', '.join(texts)})"
                + (f"; {needs} would be needed" if needs else "")
            )
        # Some files have the fields of the text part in both places.
        read.ignore(
            *(name for name, value in config.items() if name in text and text[name] == value)
        )
        ties = read.take("tie_word_embeddings", False, kind=bool)
        if "tie_word_embeddings" in config:  # the head belongs to the whole model
            inside = ties_inside and text.get("tie_word_embeddings") is True
            text["tie_word_embeddings"] = ties or inside
        read.finish()
        try:
            return texts[kind].spec_from_hf(text)
        except ModelError as error:
            message = in_config(str(error)).replace("config.json", f"{TEXT} of config.json", 1)
            raise ModelError(message) from error

    return replace(table, spec_from_hf=spec_from_hf, towers=towers)


def with_text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of config.json, and those of text_config for absent or null ones."""
    text = config.get(TEXT)
    if not isinstance(text, dict):
        return config
    return text | {name: value for name, value in config.items() if value is not None}
