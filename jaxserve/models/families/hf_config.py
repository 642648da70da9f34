"""The reading of config.json that refuses what nobody understood."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_rope import rope_of
from jaxserve.models.rope import Rope

# Fields of any config.json that change nothing in the forward pass of inference. Those of sampling
# are of the time before generation_config.json; here counts what a request says.
BOOKKEEPING: frozenset[str] = frozenset(
    "architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache "
    "initializer_range "
    "attention_dropout bos_token_id eos_token_id pad_token_id return_dict output_attentions "
    "output_hidden_states "
    "torchscript is_encoder_decoder is_decoder chunk_size_feed_forward id2label label2id "
    "problem_type "
    "_attn_implementation attn_implementation unsloth_version unsloth_fixed auto_map "
    "use_return_dict tf_legacy_loss "
    "use_bfloat16 tie_encoder_decoder finetuning_task task_specific_params tokenizer_class prefix "
    "_attn_implementation_autoset _commit_hash neftune_noise_alpha unsloth_training_mode "
    "model_max_length "
    "transformers.js_config quantization_config max_length max_sequence_length do_sample "
    "temperature top_p "
    "top_k".split()
)


MOST: Final = 2**31 - 1  # of any size: positions and ids are int32
# Of what is gone through one by one, more than any checkpoint has.
MOST_OF: Final[Mapping[str, int]] = MappingProxyType(
    {"num_hidden_layers": 2**10, "num_attention_heads": 2**12, "num_key_value_heads": 2**12}
    | dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 2**14)
)
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in layer_types


class ConfigReader:
    """config.json of one checkpoint: every field is taken, listed as bookkeeping, or reported by
    `finish`.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._config = config
        self._seen: set[str] = set(BOOKKEEPING)

    def take(
        self, name: str, default: Any = None, *, kind: type | tuple[type, ...] = (int, float, bool)
    ) -> Any:
        """The field's value; the default when it is absent or null; ModelError when it has another
        type.
        """
        self._seen.add(name)
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json lacks {name!r}, which this family needs")
        if not isinstance(value, kind):
            raise ModelError(
                f"config.json: {name} is {value!r}, not of the type it has in published checkpoints"
            )
        return value

    def nullable(self, name: str, default: float | None) -> float | None:
        """A number; the default where the field is absent, None where it is null."""
        self._seen.add(name)
        return None if self._config.get(name, default) is None else self.take(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default, kind=int)
        if isinstance(value, bool) or value < 1:
            raise ModelError(
                f"config.json: {name} is {value!r}; it must be an integer of at least 1"
            )
        if value > (most := MOST_OF.get(name, MOST)):
            raise ModelError(f"config.json: {name} is {value}; at most {most} are supported")
        return value

    def positive(self, name: str, default: float) -> float:
        value = float(self.take(name, default))
        if not 0 < value < math.inf:
            raise ModelError(f"config.json: {name} is {value:g}; it must be a positive number")
        return value

    def either(self, name: str, other: str) -> int:
        """An integer that goes by two names; ModelError where a config has both and they differ."""
        present = [each for each in (name, other) if self._config.get(each) is not None]
        values = [self.integer(each) for each in present or [name]]
        if len(set(values)) > 1:
            raise ModelError(
                f"config.json: {name} is {values[0]} and {other} {values[1]}; they have to be "
                f"the same"
            )
        return values[0]

    def kv_heads(self, heads: int, default: int | None = None) -> int:
        """num_key_value_heads; null says as many as query heads, and so does an absent field
        without a default.
        """
        if self._config.get("num_key_value_heads", default) is None:
            self._seen.add("num_key_value_heads")
            return heads
        return self.integer("num_key_value_heads", default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Accept a field only with a value that this decoder implements (or absent)."""
        self._seen.add(name)
        value = self._config.get(name, allowed[0])
        if value not in allowed:
            raise ModelError(
                f"config.json: {name} = {value!r} is not implemented (implemented: "
                f"{', '.join(map(repr, allowed))})"
            )

    def ignore(self, *names: str) -> None:
        self._seen.update(names)

    def finish(self) -> None:
        unknown = sorted(set(self._config) - self._seen)
        if unknown:
            raise ModelError(
                f"config.json has fields that this family does not understand: "
                f"{', '.join(unknown)} "
                "(ignoring them could change the answers; add them to the family file once their "
                "meaning is known)"
            )

    def rope(
        self, default_theta: float, *, layers: str = "", beside: Mapping[str, Any] | None = None
    ) -> Rope:
        """From rope_parameters (newer), or rope_theta and rope_scaling (older).

        layers: take the rope_parameters of this kind of layers, if the config keeps one set for
        each kind. beside: fields of the rope that the family's config.json has outside of it.
        """
        fields = self._object("rope_scaling") | self._object("rope_parameters")
        fields = fields.get(layers, fields)
        if not isinstance(fields, dict):
            raise ModelError(
                f"config.json: rope_parameters of {layers} are {fields!r}; they must be an object"
            )
        beside = {"rope_theta": self.take("rope_theta", default_theta), **(beside or {})}
        if fields.get("partial_rotary_factor", 1) != 1 and "partial_rotary_factor" not in beside:
            raise ModelError("config.json: partial_rotary_factor is not implemented in this family")
        return rope_of(beside | fields, self.integer("max_position_embeddings"))

    def _object(self, name: str) -> dict[str, Any]:
        self._seen.add(name)
        given = self._config.get(name) or {}
        if not isinstance(given, dict):
            raise ModelError(f"config.json: {name} is {given!r}; it must be an object or null")
        return given

    def window(self, name: str = "sliding_window", default: int | None = None) -> int | None:
        """How many tokens a query sees; null says all."""
        return None if self.nullable(name, default) is None else self.integer(name, default)

    def windows(self, window: int | None, kinds: Sequence[str]) -> tuple[int | None, ...]:
        """The window of every layer. kinds: what the layers are where config.json has no
        layer_types.
        """
        kinds = self.take("layer_types", list(kinds), kind=list)
        unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
        if unknown:
            raise ModelError(
                f"config.json: layer_types has {', '.join(unknown)}; implemented are {FULL} and "
                f"{SLIDING}"
            )
        return tuple(window if kind == SLIDING else None for kind in kinds)
