"""What of sentence-transformers' modules is implemented: the last token's hidden state,
normalized."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from jaxserve.errors import ModelError

IMPLEMENTED = "implemented: Transformer, the Pooling of the last token, Normalize"
ANY = object()  # what makes no difference here

# Module -> field of its configuration -> values that are implemented. "pooling_mode_..." is how it
# was published, "pooling_mode" how sentence-transformers writes it from version 6 on.
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
            "include_prompt": (
                ANY,
            ),  # an instruction before the text: the last token is none of it
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
    """kind: its class. file: where its configuration stands."""

    @property
    def kind(self) -> str: ...

    @property
    def file(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...


def embeds(modules: Sequence[Module]) -> bool:
    """Whether a checkpoint with these modules embeds; one without any generates. ModelError for all
    others.
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
