"""Support for sentence-transformers' modules: the last token's hidden state, normalized."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from jaxserve.errors import ModelError

IMPLEMENTED = "implemented: Transformer, the Pooling of the last token, Normalize"
ANY = object()  # stands for every value of a field that makes no difference here

# Module -> field of its configuration -> values that are implemented. Published checkpoints have
# "pooling_mode_..."; sentence-transformers writes "pooling_mode" from version 6 on.
FIELDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "Transformer": {
            "max_seq_length": (ANY,),  # nothing is cut off: what exceeds the context is an error
            "do_lower_case": (False,),
            "transformer_task": ("feature-extraction",),
            "modality_config": (ANY,),
            "module_output_name": ("token_embeddings",),
        },
        "Pooling": {
            "word_embedding_dimension": (ANY,),
            "embedding_dimension": (ANY,),
            # Whether an instruction before the text is pooled: the last token is never part of it.
            "include_prompt": (ANY,),
            "pooling_mode": ("lasttoken", ["lasttoken"]),
            "pooling_mode_lasttoken": (True,),
            "pooling_mode_cls_token": (False,),
            "pooling_mode_max_tokens": (False,),
            "pooling_mode_mean_tokens": (False,),
            "pooling_mode_mean_sqrt_len_tokens": (False,),
            "pooling_mode_weightedmean_tokens": (False,),
        },
        "Normalize": {
            "module_input_name": ("sentence_embedding",),
            "module_output_name": ("sentence_embedding", None),
        },
    }
)


class Module(Protocol):
    """A module of modules.json: its class, the file of its configuration, and the configuration."""

    @property
    def kind(self) -> str: ...

    @property
    def file(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...


def embeds(modules: Sequence[Module]) -> bool:
    """Return whether a checkpoint with these modules embeds; without any, it generates.

    ModelError when a module, or a field of its configuration, is not implemented.
    """
    kinds = [module.kind for module in modules]
    if kinds and kinds != list(FIELDS):
        raise ModelError(f"modules.json: {', '.join(kinds)} is not implemented ({IMPLEMENTED})")
    for module in modules:
        for name, value in module.config.items():
            _check(module.file, name, value, FIELDS[module.kind].get(name, ()))
        if (
            module.kind == "Pooling"
            and not {"pooling_mode", "pooling_mode_lasttoken"} & module.config.keys()
        ):
            raise ModelError(
                f"{module.file}: does not say that the last token is taken ({IMPLEMENTED})"
            )
    return bool(kinds)


def _check(file: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    if ANY not in allowed and value not in allowed:
        raise ModelError(f"{file}: {name} = {value!r} is not implemented ({IMPLEMENTED})")
