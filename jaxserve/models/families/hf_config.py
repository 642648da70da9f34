"""Reads config.json and refuses every field that the family does not understand."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_rope import rope_of
from jaxserve.models.layer_kind import LayerKind, windowed
from jaxserve.models.rope import Rope, YarnRope

# Fields that change nothing in the forward pass of any family. Those of generation are from the
# time before generation_config.json; here a request's parameters count. Those of models with an
# encoder are in files where an older transformers wrote all its defaults.
BOOKKEEPING: Final[frozenset[str]] = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache
    initializer_range attention_dropout bos_token_id eos_token_id pad_token_id return_dict
    output_attentions output_hidden_states torchscript is_encoder_decoder is_decoder
    chunk_size_feed_forward id2label label2id problem_type _attn_implementation attn_implementation
    unsloth_version unsloth_fixed auto_map use_return_dict tf_legacy_loss use_bfloat16
    tie_encoder_decoder finetuning_task task_specific_params tokenizer_class prefix
    _attn_implementation_autoset _commit_hash neftune_noise_alpha unsloth_training_mode
    model_max_length transformers.js_config quantization_config max_length max_sequence_length
    do_sample temperature top_p top_k typical_p min_length num_beams num_beam_groups
    diversity_penalty length_penalty repetition_penalty no_repeat_ngram_size early_stopping
    exponential_decay_length_penalty bad_words_ids suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id num_return_sequences output_scores
    return_dict_in_generate remove_invalid_values sep_token_id encoder_no_repeat_ngram_size
    decoder_start_token_id add_cross_attention cross_attention_hidden_size
    """.split()
)
MAX_SIZE: Final = 2**31 - 1  # positions and ids are int32
# Lower limits for counts that are iterated over, which a hostile file could make endless. They are
# more than any checkpoint has.
MAX_COUNTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "num_hidden_layers": 2**10,
        "num_attention_heads": 2**12,
        "num_key_value_heads": 2**12,
        "num_local_experts": 2**14,
        "num_experts": 2**14,
        "n_routed_experts": 2**14,
        "moe_num_experts": 2**14,
    }
)
MAX_SHOWN: Final = 80  # characters of a value in an error message
# Kinds of layers in layer_types.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def longest_context(rope: Rope, max_positions: int) -> int:
    """Return the positions that a model supports, in tokens.

    YaRN that is added to a published config.json, as the cards of Qwen's models say, leaves
    max_position_embeddings as it was.

    Args:
        max_positions: max_position_embeddings.
    """
    if not isinstance(rope, YarnRope):
        return max_positions
    if not rope.original_context <= MAX_SIZE / rope.factor:
        raise ModelError(
            f"config.json: yarn with a factor of {rope.factor:g} for "
            f"{shown(rope.original_context)} positions supports more than {MAX_SIZE}"
        )
    return max(max_positions, int(rope.factor * rope.original_context))


def shown(value: Any) -> str:
    """Return a value for an error message, shortened where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


class ConfigReader:
    """Reader of one config.json that keeps account of the fields it has read.

    `finish` refuses fields that were neither read nor ignored.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._config = config
        self._seen: set[str] = set(BOOKKEEPING)

    def common(
        self,
        *,
        hidden_size: int | None = None,
        num_attention_heads: int | None = None,
        rms_norm_eps: float = 1e-6,
        tie_word_embeddings: bool = False,
    ) -> dict[str, Any]:
        """Read the fields of ModelSpec that every family has.

        The parameters are the family's defaults for absent fields of config.json, as its class in
        transformers has them. A field without a default here has to be in config.json.
        """
        return dict(
            vocab_size=self.integer("vocab_size"),
            d_model=self.integer("hidden_size", hidden_size),
            num_layers=self.integer("num_hidden_layers"),
            num_heads=self.integer("num_attention_heads", num_attention_heads),
            d_mlp=self.integer("intermediate_size"),
            norm_eps=self.number("rms_norm_eps", rms_norm_eps),
            max_positions=self.integer("max_position_embeddings"),
            tied_head=self.take("tie_word_embeddings", tie_word_embeddings, kind=bool),
        )

    def llama_like(
        self,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        rope: Rope | None = None,
        **defaults: Any,
    ) -> dict[str, Any]:
        """Read the `common` fields and those of grouped-query attention with a rope.

        The parameters are defaults, as those of `common`.

        Args:
            num_key_value_heads: Number of KV heads; None stands for as many as query heads.
            head_dim: Size of a head; None stands for hidden_size / num_attention_heads.
            rope: Rope of a family that reads its rope itself.
        """
        fields = self.common(**defaults)
        heads = fields["num_heads"]
        rope = rope or self.rope(rope_theta)
        return fields | dict(
            num_kv_heads=self.kv_heads(heads, num_key_value_heads),
            head_dim=self.integer("head_dim", head_dim or fields["d_model"] // heads),
            rope=rope,
            max_positions=longest_context(rope, fields["max_positions"]),
        )

    def has(self, name: str) -> bool:
        """Return whether config.json has a field that is not null, without reading it."""
        return self._config.get(name) is not None

    def take(
        self, name: str, default: Any = None, *, kind: type | tuple[type, ...] = (int, float, bool)
    ) -> Any:
        """Return a field, or the default when it is absent or null.

        ModelError when the field has another type, or is absent and has no default.
        """
        self._seen.add(name)
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json lacks {name!r}, which this family needs")
        if not isinstance(value, kind):
            raise ModelError(
                f"config.json: {name} is {shown(value)}, not of the type it has in published files"
            )
        return value

    def nullable(self, name: str, default: float | None) -> float | None:
        """Return a number, the default where the field is absent, None where it is null."""
        self._seen.add(name)
        return None if self._config.get(name, default) is None else self.take(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1; otherwise as `take`."""
        value = self.take(name, default, kind=int)
        if isinstance(value, bool) or value < 1:
            raise ModelError(
                f"config.json: {name} is {value!r}; it must be an integer of at least 1"
            )
        limit = MAX_COUNTS.get(name, MAX_SIZE)
        if value > limit:
            raise ModelError(f"config.json: {name} is {value}; at most {limit} are supported")
        return value

    def count(self, name: str, default: int) -> int:
        """Return an integer of at least 0; otherwise as `take`."""
        value = self.take(name, default, kind=int)
        if isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
            raise ModelError(f"config.json: {name} is {value!r}; it must be 0 to {MAX_SIZE}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number as float; ModelError where it is too large for one."""
        value = self.take(name, default, kind=(int, float))
        if isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {value}; it must be a number")
        try:
            return float(value)
        except OverflowError:
            raise ModelError(f"config.json: {name} is beyond the range of float64") from None

    def positive(self, name: str, default: float) -> float:
        """Return a finite number above 0."""
        value = self.number(name, default)
        if not 0 < value < math.inf:
            raise ModelError(f"config.json: {name} is {value:g}; it must be a positive number")
        return value

    def either(self, name: str, other: str) -> int:
        """Return an integer that has two names; ModelError where both are there and differ."""
        present = [each for each in (name, other) if self._config.get(each) is not None]
        values = [self.integer(each) for each in present or [name]]
        if len(set(values)) > 1:
            raise ModelError(
                f"config.json: {name} is {values[0]} and {other} {values[1]}; they have to be "
                f"the same"
            )
        return values[0]

    def kv_heads(self, heads: int, default: int | None = None) -> int:
        """Return num_key_value_heads, which is `heads` where the field is null.

        An absent field means the default, or `heads` without one.
        """
        if self._config.get("num_key_value_heads", default) is None:
            self._seen.add("num_key_value_heads")
            return heads
        return self.integer("num_key_value_heads", default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Accept a field that is absent or has one of the values that are implemented.

        The first value is the one that an absent field stands for.
        """
        self._seen.add(name)
        value = self._config.get(name, allowed[0])
        if value not in allowed:
            raise ModelError(
                f"config.json: {name} = {shown(value)} is not implemented (implemented: "
                f"{', '.join(map(repr, allowed))})"
            )

    def ignore(self, *names: str) -> None:
        """Accept fields that change nothing, whatever their values."""
        self._seen.update(names)

    def finish(self) -> None:
        """Raise ModelError naming the fields that were neither read nor ignored."""
        unknown = sorted(set(self._config) - self._seen)
        if unknown:
            raise ModelError(
                "config.json has fields that this family does not understand: "
                f"{', '.join(unknown)} (ignoring them could change the answers; add them to the "
                "family file once their meaning is known)"
            )

    def rope(
        self,
        default_theta: float,
        *,
        layers: str = "",
        beside: Mapping[str, Any] | None = None,
        apart: tuple[str, ...] = (),
    ) -> Rope:
        """Read the rope from rope_parameters (newer), or rope_theta and rope_scaling (older).

        Args:
            layers: Kind of layers, for families whose rope_parameters have a set for each kind.
            beside: Fields of the rope that config.json has beside rope_parameters or rope_scaling.
            apart: Fields of rope_parameters that are not the rope's; the family reads them.
        """
        fields = self.object("rope_scaling") | self.object("rope_parameters")
        if layers in fields:
            others = set(fields) - {FULL, SLIDING}
            if others:
                raise ModelError(
                    f"config.json: rope_parameters have {', '.join(sorted(others))} beside those "
                    "of kinds of layers"
                )
            fields = fields[layers]
        if not isinstance(fields, dict):
            raise ModelError(
                f"config.json: rope_parameters of {layers} are {fields!r}; they must be an object"
            )
        fields = {name: value for name, value in fields.items() if name not in apart}
        outside = {"rope_theta": self.take("rope_theta", default_theta), **(beside or {})}
        if fields.get("partial_rotary_factor", 1) != 1 and "partial_rotary_factor" not in outside:
            raise ModelError("config.json: partial_rotary_factor is not implemented in this family")
        return rope_of(outside | fields, self.integer("max_position_embeddings"))

    def object(self, name: str) -> dict[str, Any]:
        """Return an object, which is empty where the field is absent or null."""
        self._seen.add(name)
        given = self._config.get(name) or {}
        if not isinstance(given, dict):
            raise ModelError(f"config.json: {name} is {given!r}; it must be an object or null")
        return given

    def no_dual_chunks(self) -> None:
        """Raise ModelError for attention in two kinds of chunks (An et al. 2024).

        Within the first chunk it is attention as usual, which the error offers.
        """
        chunks = self.object("dual_chunk_attention_config")
        if not chunks:
            return
        inside = ConfigReader(chunks)
        first = inside.integer("chunk_size") - inside.integer("local_size")
        raise ModelError(
            "config.json: dual_chunk_attention_config is not implemented. The model answers the "
            f"same without it in contexts of at most {first} tokens (chunk_size - local_size): "
            "remove the field, and lower max_position_embeddings to that"
        )

    def window(self, name: str = "sliding_window", default: int | None = None) -> int | None:
        """Return how many tokens a query sees; None, for all, where the field is null."""
        return None if self.nullable(name, default) is None else self.integer(name, default)

    def layers(self, window: int | None, kinds: Sequence[str]) -> tuple[LayerKind, ...]:
        """Return the kind of every layer: with `window` for sliding layers, without for the others.

        Args:
            kinds: Kinds of layers where config.json has no layer_types.
        """
        count = self.integer("num_hidden_layers")
        kinds = self.take("layer_types", list(kinds), kind=list)
        if len(kinds) != count:
            raise ModelError(
                f"config.json: layer_types has {len(kinds)} layers; the model has {count}"
            )
        # layer_types may hold anything that JSON can write.
        unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
        if unknown:
            raise ModelError(
                f"config.json: layer_types has {', '.join(unknown)}; implemented are {FULL} and "
                f"{SLIDING}"
            )
        if window is None and SLIDING in kinds:
            raise ModelError(
                f"config.json: layer_types has {SLIDING}, and no sliding_window is in use"
            )
        return windowed(window if kind == SLIDING else None for kind in kinds)
