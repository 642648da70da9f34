"""Qwen3-Next: three layers with a recurrent state (Gated DeltaNet) to one with attention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxserve.models.families.hf_config import FULL, LINEAR, ConfigReader
from jaxserve.models.families.hf_names import layer_tensors, tensors
from jaxserve.models.families.qwen2_moe import mixture, separate_experts
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.layer_kind import DeltaState, LayerKind
from jaxserve.models.spec import ModelSpec

Rows = Callable[[int], list[Tensor]]  # rows of a weight table, by layer

# Rows of q_proj: the queries of each head, then the gates behind its attention.
GATED_QUERY = "(KG[H|H])D"
GATED_GATE = "(N[H|H])D"
# Channels of the convolution, and rows of the products that it gets: all queries, keys, values.
QUERY_KEY_VALUE = "([kd|kd|krv])"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("use_sliding_window", False)
    layers = read.integer("num_hidden_layers")
    d_shared = read.integer("shared_expert_intermediate_size", 512)
    spec = ModelSpec(
        family="qwen3_next",
        mixture=mixture(read, layers, norm_topk_prob=True, d_shared=d_shared, shared_gate=True),
        **hybrid_fields(read, num_key_value_heads=2),
    )
    read.finish()
    return spec


def hybrid_fields(read: ConfigReader, **defaults: Any) -> dict[str, Any]:
    """Read what Qwen3-Next and Qwen3.5 have alike beside their MLPs.

    Args:
        **defaults: Defaults of the family for absent fields, as of `llama_like`.
    """
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    rotated = read.positive("partial_rotary_factor", 0.25)
    rope = read.rope(10000.0, beside={"partial_rotary_factor": rotated})
    return dict(
        layers=_layers(read),
        qk_norm="head",
        norm_plus_one=True,
        attn_gate=True,
        **read.llama_like(head_dim=256, rope=rope, **defaults),
    )


def _layers(read: ConfigReader) -> tuple[LayerKind, ...]:
    """Return the kind of every layer: each full_attention_interval-th one has attention."""
    count = read.integer("num_hidden_layers")
    interval = read.integer("full_attention_interval", 4)
    usual = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    kinds = read.layer_types(usual, FULL, LINEAR)
    state = DeltaState(
        key_heads=read.integer("linear_num_key_heads", 16),
        value_heads=read.integer("linear_num_value_heads", 32),
        key_dim=read.integer("linear_key_head_dim", 128),
        value_dim=read.integer("linear_value_head_dim", 128),
        taps=read.integer("linear_conv_kernel_dim", 4),
    )
    return tuple(LayerKind(state=state) if kind == LINEAR else LayerKind() for kind in kinds)


def qwen3_next_tensors(spec: ModelSpec) -> list[Tensor]:
    return hybrid_tensors(spec, _projections, partial(separate_experts, spec))


def hybrid_tensors(spec: ModelSpec, projections: Rows, experts: Rows | None = None) -> list[Tensor]:
    """Return the weight table of Qwen3-Next or Qwen3.5.

    Args:
        projections: Function that returns the rows of a state's input, by layer.
        experts: Function that returns the rows of a layer's experts.
    """

    def state(layer: int) -> list[Tensor]:
        return projections(layer) + _recurrence(layer)

    table = tensors(spec, experts=experts, state=state)
    return [row for tensor in table for row in _with_gate(tensor)]


def _with_gate(row: Tensor) -> list[Tensor]:
    """Return the rows of a tensor: queries lie beside the gates behind attention."""
    *layer, name = row.path
    if name != "q":
        return [row]
    return [
        Tensor(row.name, row.path, GATED_QUERY),
        Tensor(row.name, (*layer, "attn_gate"), GATED_GATE, part=1),
    ]


def _projections(layer: int) -> list[Tensor]:
    """Return the rows of a state's input, of which each key head has its own together."""
    table = {
        "in_proj_qkvz.weight": ("state_in", "(ke)D"),
        "in_proj_ba.weight": ("state_rates", "(kb)D"),
    }
    return state_tensors(layer, table)


def _recurrence(layer: int) -> list[Tensor]:
    table = {
        "A_log": ("decay_log", "(kr)"),
        "dt_bias": ("decay_bias", "(kr)"),
        "norm.weight": ("state_norm", "v"),
        "out_proj.weight": ("state_out", "D(krv)"),
    }
    return state_tensors(layer, table) + query_key_value(
        layer, "conv1d.weight", ("query_taps", "key_taps", "value_taps"), "()t"
    )


def state_tensors(layer: int, table: Mapping[str, tuple[str, str]]) -> list[Tensor]:
    """Return rows of a layer's state, as `layer_tensors` does."""
    return layer_tensors(layer, {f"linear_attn.{name}": row for name, row in table.items()})


def query_key_value(
    layer: int, name: str, params: tuple[str, ...], other_axes: str
) -> list[Tensor]:
    """Return the rows of a tensor that has all queries, then all keys, then all values."""
    axes = QUERY_KEY_VALUE + other_axes
    return [
        Tensor(f"model.layers.{layer}.linear_attn.{name}", ("layers", layer, param), axes, part)
        for part, param in enumerate(params)
    ]


def without_prediction(spec: ModelSpec) -> tuple[str, ...]:
    """Ignore the layers that predict further tokens, which nothing here uses."""
    return ("mtp.*",)


FAMILY = Family(spec_from_hf, qwen3_next_tensors, ignored=without_prediction)
