"""Recipes of the bundled models: sizes of corpus, model and steps, and the optimizer's settings.

Letters: B rows, T tokens, N query heads, K kv heads, G = N/K, H head dim, D model, F mlp, V vocab.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Recipe:
    """Sizes and settings of a training.

    Every long_every-th window has `context` tokens, which is the longest context that the models
    are made for; the others have short_context. batch is 1: at this size many small steps learn
    more from a token than few large ones. question_weight: the weight in the loss of a token
    outside of the answers; one inside has 1.
    """

    model: int  # D
    mlp: int  # F
    layers: int
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    peak_rate: float
    documents: int = 40_000
    long_chats: int = 1_000
    held_out_documents: int = 40  # of each kind
    tokenizer_documents: int = 6_000
    vocab: int = 2048  # V
    context: int = 2048  # T of long windows
    short_context: int = 512  # T of short windows
    long_every: int = 24
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    batch: int = 1  # B
    question_weight: float = 0.2
    warmup_steps: int = 200
    weight_decay: float = 0.1
    checkpoint_every: int = 250


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "target": Recipe(
            model=256, mlp=576, layers=6, heads=8, kv_heads=4, head_dim=32, peak_rate=2e-3
        ),
        # Shorter windows give more steps: with fewer the model learns no sums. Nine of ten
        # documents fit into a window.
        "draft": Recipe(
            model=96,
            mlp=128,
            layers=3,
            heads=8,
            kv_heads=2,
            head_dim=16,
            peak_rate=3e-3,
            short_context=256,
            long_every=64,
        ),
    }
)
