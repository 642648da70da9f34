"""Names of weights that families share, as Hugging Face writes them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from jaxserve.models.families.weight_table import Tensor
from jaxserve.models.fused import PLAIN, ROTATED, WHOLE
from jaxserve.models.spec import ModelSpec

PRE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
PROJECTIONS = {
    "self_attn.q_proj": ("q", "(KGH)D"),
    "self_attn.k_proj": ("k", "(KH)D"),
    "self_attn.v_proj": ("v", "(KH)D"),
    "self_attn.o_proj": ("o", "D(NH)"),
}
MLP = {"gate": "FD", "up": "FD", "down": "DF"}
QKV_BIASES = {"q": "(KGH)", "k": "(KH)", "v": "(KH)"}
MLP_BIASES = {"gate": "F", "up": "F", "down": "D"}
QK_NORMS = {
    "none": {},
    "head": {"q_norm": "H", "k_norm": "H"},
    "whole": {"q_norm": "(NH)", "k_norm": "(KH)"},
}


def outer_tensors(spec: ModelSpec) -> list[Tensor]:
    """Return the rows of the embedding, the final norm, and the head if the model has one."""
    rows = [
        Tensor("model.embed_tokens.weight", ("embed",), "VD"),
        Tensor("model.norm.weight", ("norm",), "D"),
    ]
    return [*rows, Tensor("lm_head.weight", ("head",), "VD")] if spec.has_head else rows


def tensors(
    spec: ModelSpec,
    norms: Mapping[str, str] = PRE_NORMS,
    experts: Callable[[int], list[Tensor]] | None = None,
    state: Callable[[int], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Return the weight table of a decoder with separate projections.

    Args:
        norms: Parameters of the norms by their names in the checkpoint.
        experts: Function that returns the rows of a layer with experts, in place of an MLP's.
        state: Function that returns the rows of a layer with a state, in place of attention's.
    """
    attention = {f"{name}.weight": param for name, param in PROJECTIONS.items()}
    of_norms = {f"{name}.weight": (param, "D") for name, param in norms.items()}
    attention |= {
        f"self_attn.{name}.weight": (name, axes) for name, axes in QK_NORMS[spec.qk_norm].items()
    }
    if spec.qkv_bias:
        attention |= {
            f"self_attn.{name}_proj.bias": (f"{name}_bias", axes)
            for name, axes in QKV_BIASES.items()
        }
    if spec.out_bias:
        attention |= {"self_attn.o_proj.bias": ("o_bias", "D")}
    mlp = {f"mlp.{name}_proj.weight": (name, axes) for name, axes in MLP.items()}
    if spec.mlp_bias:
        mlp |= {
            f"mlp.{name}_proj.bias": (f"{name}_bias", axes) for name, axes in MLP_BIASES.items()
        }
    rows = outer_tensors(spec)
    for layer in range(spec.num_layers):
        rows += layer_tensors(layer, of_norms)
        if state and spec.kinds[layer].state:
            rows += state(layer)
        else:
            rows += layer_tensors(layer, attention)
        if experts and spec.has_experts(layer):
            rows += experts(layer)
        else:
            rows += layer_tensors(layer, mlp)
    return rows


def renamed(rows: Iterable[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    """Return rows whose names have other parts: those of `names`, by the parts they replace."""
    table = list[Tensor]()
    for row in rows:
        name = row.name
        for usual, own in names.items():
            name = name.replace(usual, own)
        table.append(replace(row, name=name))
    return table


def neighbours(spec: ModelSpec, rows: Iterable[Tensor]) -> list[Tensor]:
    """Return the weight table of a model that has rotated pairs beside each other (GPT-J).

    Dimensions 2i and 2i + 1 of a head are a pair there. Parameters have all first numbers before
    all second ones, as `rotate` needs them.

    Args:
        rows: The table of a model whose parameters are in that order.
    """
    table = list[Tensor]()
    for row in rows:
        name = str(row.path[-1])
        if name.removesuffix("_bias") in ("q", "k"):
            axes = row.axes.replace("H", "[ij|h]")
            table.append(replace(row, axes=axes, part=0, head=ROTATED))
            if spec.sizes()["h"]:
                table.append(replace(row, axes=axes, part=1, head=PLAIN))
        elif name.removesuffix("_bias") == "v":
            table.append(replace(row, head=WHOLE))
        else:
            table.append(row)
    return table


def layer_tensors(layer: int, table: Mapping[str, tuple[str, str]], *block: str) -> list[Tensor]:
    """Return one layer's rows.

    Args:
        table: Parameter and axes of each weight by its name in the checkpoint.
        *block: Nested block of the layer's parameters, if they are in one.
    """
    return [
        Tensor(f"model.layers.{layer}.{name}", ("layers", layer, *block, param), axes)
        for name, (param, axes) in table.items()
    ]


def expert_tensors(
    spec: ModelSpec,
    layer: int,
    prefix: str = "mlp",
    names: Mapping[str, str] = MappingProxyType(
        {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    ),
    shared: str = "",
) -> list[Tensor]:
    """Return the rows of the router, of every expert, and of the MLP that all tokens take.

    Args:
        prefix: Name of the block in the checkpoint.
        names: Parameters by the names of an expert's tensors.
        shared: Name of the MLP that all tokens take; empty if there is none.
    """
    assert spec.mixture
    axes = {name: (param, MLP[param]) for name, param in names.items()}
    rows = layer_tensors(layer, {f"{prefix}.gate.weight": ("router", "OD")})
    for expert in range(spec.mixture.experts):
        table = {f"{prefix}.experts.{expert}.{name}.weight": row for name, row in axes.items()}
        rows += [replace(row, expert=expert) for row in layer_tensors(layer, table, "experts")]
    if shared:
        rows += layer_tensors(
            layer, {f"{prefix}.{shared}.{name}.weight": row for name, row in axes.items()}, "shared"
        )
    return rows
