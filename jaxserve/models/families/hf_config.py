"""Reads config.json and refuses every field that the family does not understand."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_rope import rope_of
from jaxserve.models.families.typed_fields import MAX_SIZE, Fields, shown
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
# Kinds of layers in layer_types.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LINEAR: Final = "linear_attention"


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


class ConfigReader(Fields):
    """Reader of one config.json, with what several families read alike."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config, known=BOOKKEEPING)

    def common(
        self,
        *,
        hidden_size: int | None = None,
        num_attention_heads: int | None = None,
        intermediate_size: int | None = None,
        rms_norm_eps: float = 1e-6,
        eps_field: str = "rms_norm_eps",
        tie_word_embeddings: bool = False,
    ) -> dict[str, Any]:
        """Read the fields of ModelSpec that every family has.

        The parameters are the family's defaults for absent fields of config.json, as its class in
        transformers has them. A field without a default here has to be in config.json.

        Args:
            eps_field: Name of the field of which `rms_norm_eps` is the default.
        """
        return dict(
            vocab_size=self.integer("vocab_size"),
            d_model=self.integer("hidden_size", hidden_size),
            num_layers=self.integer("num_hidden_layers"),
            num_heads=self.integer("num_attention_heads", num_attention_heads),
            d_mlp=self.integer("intermediate_size", intermediate_size),
            norm_eps=self.small(eps_field, rms_norm_eps),
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

    def kv_heads(self, heads: int, default: int | None = None) -> int:
        """Return num_key_value_heads, which is `heads` where the field is null.

        An absent field means the default, or `heads` without one.
        """
        if self._config.get("num_key_value_heads", default) is None:
            self._seen.add("num_key_value_heads")
            return heads
        return self.integer("num_key_value_heads", default)

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
        kinds = self.layer_types(kinds, FULL, SLIDING)
        if window is None and SLIDING in kinds:
            raise ModelError(
                f"config.json: layer_types has {SLIDING}, and no sliding_window is in use"
            )
        return windowed(window if kind == SLIDING else None for kind in kinds)

    def layer_types(self, usual: Sequence[str], *known: str) -> Sequence[str]:
        """Return layer_types, one for each layer; ModelError for one that is not known.

        Args:
            usual: Kinds of layers where config.json has no layer_types.
        """
        count = self.integer("num_hidden_layers")
        kinds = self.take("layer_types", list(usual), kind=list)
        if len(kinds) != count:
            raise ModelError(
                f"config.json: layer_types has {len(kinds)} layers; the model has {count}"
            )
        # layer_types may hold anything that JSON can write.
        unknown = sorted({str(kind) for kind in kinds} - set(known))
        if unknown:
            raise ModelError(
                f"config.json: layer_types has {', '.join(unknown)}; implemented are "
                f"{' and '.join(known)}"
            )
        return kinds
