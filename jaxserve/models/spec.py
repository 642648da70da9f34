"""ModelSpec: the architecture of a checkpoint and nothing else (the operator's choices are in jaxserve.config)."""

from dataclasses import dataclass, field
from typing import Literal

from jaxserve.errors import ModelError
from jaxserve.models.rope import Rope


@dataclass(frozen=True)
class PageGroup:
    """Layers that share a page table, because they keep the same tokens of a sequence.

    A page of the group holds page_size tokens of K heads of head_dim for keys and for values, in every layer of it.
    """

    layers: tuple[int, ...]
    kind: Literal["full"]
    kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * page_size * itemsize


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. Field names follow the legend in sharding/rules.py."""

    family: str
    vocab_size: int  # V
    d_model: int  # D
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    d_mlp: int  # F
    norm_eps: float
    max_positions: int
    rope: Rope = field(default_factory=Rope)
    tied_head: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "d_model",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "d_mlp",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"norm_eps is {self.norm_eps}; it must be a small positive number")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads do not divide by {self.num_kv_heads} kv heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")

    def sizes(self) -> dict[str, int]:
        """Size of every dimension that a weight can have, by letter."""
        return {
            "V": self.vocab_size,
            "D": self.d_model,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "F": self.d_mlp,
        }

    def page_groups(self) -> tuple[PageGroup, ...]:
        return (PageGroup(tuple(range(self.num_layers)), "full", self.num_kv_heads, self.head_dim),)
