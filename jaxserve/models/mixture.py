"""Mixture: the configuration of a model's expert layers."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ModelError


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: MLPs of which every token takes a few (Shazeer et al. 2017).

    A token's scores are the softmax or sigmoid of its router logits. It takes the `taken` best
    experts of its groups_taken best groups; a group's score is the sum of its `judges` best
    experts'. An expert's answer is multiplied by its score, divided by the sum of the taken
    experts' scores if normalized, times scale.
    """

    experts: int  # E
    taken: int  # X
    d_expert: int  # F of one expert
    layers: tuple[int, ...]  # layers that have experts; the others have a plain MLP
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_taken: int = 1
    judges: int = 1
    # A learned bias takes part in the choice of experts but not in the weights of their answers
    # (DeepSeek-V3).
    corrected: bool = False
    # The router keeps float32, and its product has float32 operands: rounding it would send about
    # one token of a hundred to other experts.
    router_float32: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    d_shared: int = 0  # F of an MLP that all tokens take; 0 for none
    shared_gate: bool = False  # the shared MLP's output is multiplied by the sigmoid of one logit

    def __post_init__(self) -> None:
        if self.d_expert < 1 or not self.layers:
            raise ModelError(
                f"a mixture with experts of size {self.d_expert} in {len(self.layers)} layers; "
                f"both numbers must be at least 1"
            )
        if self.groups < 1 or self.experts % self.groups:
            raise ModelError(f"{self.experts} experts do not divide into {self.groups} groups")
        if not 1 <= self.groups_taken <= self.groups:
            raise ModelError(
                f"{self.groups_taken} of {self.groups} groups of experts are taken; it must be 1 "
                f"to {self.groups}"
            )
        if not 1 <= self.taken <= self.experts // self.groups * self.groups_taken:
            raise ModelError(
                f"{self.taken} experts per token are more than {self.groups_taken} of "
                f"{self.groups} groups of {self.experts} experts have, or less than 1"
            )
        if not 1 <= self.judges <= self.experts // self.groups:
            raise ModelError(
                f"groups of {self.experts // self.groups} experts are judged by {self.judges} of "
                f"them"
            )
        if not 0 < self.scale < math.inf:
            raise ModelError(
                f"the scale of the experts' weights is {self.scale}; it must be a positive number"
            )

    @property
    def kept_float32(self) -> frozenset[str]:
        """Names of parameters that are not rounded, since it would change the choice of experts."""
        names = {"correction"} if self.corrected else set()
        return frozenset(names | ({"router"} if self.router_float32 else set()))

    def sizes(self, block: str) -> dict[str, int]:
        """Return the size of the dimensions that mixtures add or change, by letter."""
        sizes = {"E": self.experts, "O": self.experts}
        if block == "experts":
            sizes["F"] = self.d_expert
        elif block == "shared":
            sizes["F"] = self.d_shared
        return sizes
