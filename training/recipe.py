"""The two recipes: sizes of corpus, model and steps, and the optimizer's figures.

Letters: B rows, T tokens, N query heads, K kv heads, G = N/K, H head dim, D model, F mlp, V vocab.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Recipe:
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
    context: int = (
        2048  # T of every long_every-th window, and the longest context the models are made for
    )
    short_context: int = 512  # T of the others
    long_every: int = 24
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    batch: int = 1  # B: at this size many small steps learn more from a token than few large ones
    question_weight: float = (
        0.2  # what a token outside of the answers counts in the loss; one inside counts 1
    )
    warmup_steps: int = 200
    weight_decay: float = 0.1
    checkpoint_every: int = 250


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "target": Recipe(
            model=256, mlp=576, layers=6, heads=8, kv_heads=4, head_dim=32, peak_rate=2e-3
        ),
        # Shorter windows, and so more steps: with fewer it learns no sums. Nine documents of ten
        # fit.
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
