"""Forms of model.safetensors that publishers write and transformers reads, but does not save."""

from collections.abc import Callable
from dataclasses import dataclass

import torch  # pyright: ignore[reportMissingImports]

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """`encode` makes the published tensors of float32 ones, `decode` the float32 ones that they stand for."""

    encode: Callable[[Tensors], Tensors]
    decode: Callable[[Tensors], Tensors]


def mtp_layer(layer: int) -> Stored:
    """A layer after the last one, for predicting the token after next: DeepSeek-V3 has it in its checkpoint."""

    def encode(tensors: Tensors) -> Tensors:
        last, new = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
        hidden = tensors["model.norm.weight"].shape[0]
        block = {name.replace(last, new): x.flip(0) for name, x in tensors.items() if name.startswith(last)}
        norms = {f"{new}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        ends = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        copies = {f"{new}{name}.weight": tensors[f"{source}.weight"].clone() for name, source in ends.items()}
        return {**tensors, **block, **norms, **copies, f"{new}eh_proj.weight": torch.eye(hidden, 2 * hidden)}

    def decode(tensors: Tensors) -> Tensors:
        return {name: x for name, x in tensors.items() if not name.startswith(f"model.layers.{layer}.")}

    return Stored(encode, decode)
