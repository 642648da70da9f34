"""Makes the bundled checkpoint: writes the corpus, trains the tokenizer and a small Llama, saves a Hugging Face folder.

    python -m checkpoints.bundled.train --out DIR [--minutes 10 | --steps N] [--seed 0] [--work DIR]

With --steps the weights depend on seed and steps alone (on one kind of machine); with --minutes the clock decides how
many steps there are and the learning rate follows it down. An interrupted run goes on from its last checkpoint in
the work folder. Letters: B rows, T tokens, N query heads, K kv heads, G = N/K, H head dim, D model, F mlp, V vocab.
"""

import argparse
import dataclasses
import functools
import io
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import sentencepiece
from flax import nnx
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.flax import save_file

from checkpoints.bundled.corpus import documents

UNK, BOS, EOS = 0, 1, 2


@dataclass(frozen=True)
class Recipe:
    """The sizes of corpus, model and steps, and the optimizer's figures."""

    documents: int = 40_000
    held_out_documents: int = 400
    tokenizer_documents: int = 4_000
    vocab: int = 1024  # V
    model: int = 128  # D
    mlp: int = 320  # F
    layers: int = 5
    heads: int = 8  # N
    kv_heads: int = 4  # K
    head_dim: int = 16  # H
    context: int = 512  # T
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    batch: int = 8  # B
    peak_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    checkpoint_every: int = 200


@dataclass(frozen=True)
class Budget:
    """What ends the training: a number of steps or, where that is None, minutes of training."""

    steps: int | None
    minutes: float

    def progress(self, step: int, seconds: float) -> float:
        return seconds / (60 * self.minutes) if self.steps is None else step / self.steps


# The model. Attributes are named as in Hugging Face's LlamaForCausalLM, so that paths are tensor names.


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions 0..T-1 on x [B, T, heads, H], pairing dimension i with i + H/2 (arXiv 2104.09864)."""
    tokens, half = x.shape[1], x.shape[3] // 2
    angle = jnp.arange(tokens)[:, None] * theta ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.recipe = recipe
        self.q_proj = linear(recipe.model, recipe.heads * recipe.head_dim, rngs)
        self.k_proj = linear(recipe.model, recipe.kv_heads * recipe.head_dim, rngs)
        self.v_proj = linear(recipe.model, recipe.kv_heads * recipe.head_dim, rngs)
        self.o_proj = linear(recipe.heads * recipe.head_dim, recipe.model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D]
        split = functools.partial(jnp.reshape, shape=(*x.shape[:2], -1, self.recipe.head_dim))
        q = rotate(split(self.q_proj(x)), self.recipe.rope_theta)
        k = rotate(split(self.k_proj(x)), self.recipe.rope_theta)
        out = jax.nn.dot_product_attention(q, k, split(self.v_proj(x)), is_causal=True)  # [B, T, N, H]
        return self.o_proj(out.reshape(x.shape[:2] + (-1,)))


class Mlp(nnx.Module):
    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.gate_proj = linear(recipe.model, recipe.mlp, rngs)
        self.up_proj = linear(recipe.model, recipe.mlp, rngs)
        self.down_proj = linear(recipe.mlp, recipe.model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.input_layernorm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)
        self.self_attn = Attention(recipe, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)
        self.mlp = Mlp(recipe, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """tokens [B, T] int32 -> logits [B, T, V] float32; the head is the embedding."""

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.embed_tokens = nnx.Embed(recipe.vocab, recipe.model, embedding_init=small, rngs=rngs)
        self.layers = nnx.List([Layer(recipe, rngs) for _ in range(recipe.layers)])
        self.norm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed_tokens.attend(self.norm(x))
