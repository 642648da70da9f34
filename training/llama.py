"""The model that is trained: a Llama whose attribute paths are Hugging Face's tensor names."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from training.recipe import Recipe


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Apply rotary embedding (arXiv 2104.09864) at positions 0..T-1 to x [B, T, heads, H].

    Dimension i is rotated with dimension i + H/2.
    """
    half = x.shape[3] // 2
    frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequency)
    angle = angle[None, :, None, :]  # [1, T, 1, H/2]
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array) -> jax.Array:
    """Return causal attention [B, T, N, H] of q [B, T, N, H] to k and v [B, T, K, H].

    document: [B, T] int32; a token sees only tokens of its own document. Queries are processed in
    blocks, each with the keys up to its end: that is half the work, and scores fit into a CPU's
    cache.
    """
    length, heads, depth = q.shape[1:]
    shared = k.shape[2]
    q = (q * depth**-0.5).reshape(*q.shape[:2], shared, heads // shared, depth)
    q = q.transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    k = k.transpose(0, 2, 3, 1)  # [B, K, H, T]
    v = v.transpose(0, 2, 1, 3)  # [B, K, T, H]
    block = max(64, length // 16)
    blocks = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        past = jnp.tri(stop - start, stop, start, dtype=bool)[None]
        seen = past & (document[:, start:stop, None] == document[:, None, :stop])
        blocks.append(attend(q[:, :, :, start:stop], k[..., :stop], v[:, :, :stop], seen))
    return (
        jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(-1, length, heads, depth)
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Return attention [B, K, G, Q, H] of one block of queries.

    q: [B, K, G, Q, H], scaled. k: [B, K, H, S]. v: [B, K, S, H]. seen: [B, Q, S] bool. The query
    heads of a kv head are rows of one matrix product; the softmax divides after the second product,
    which has fewer numbers.
    """
    together = (*q.shape[:2], -1)
    scores = (q.reshape(*together, q.shape[4]) @ k).reshape(*q.shape[:4], -1)
    scores = scores + jnp.where(seen, 0.0, -1e9)[:, None, None]
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    values = (weights.reshape(*together, weights.shape[4]) @ v).reshape(q.shape)
    return values / weights.sum(axis=-1, keepdims=True)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    """Create a linear layer without bias, initialized with the given variance scale."""
    spread = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=spread, rngs=rngs)


class Attention(nnx.Module):
    """Grouped-query self-attention on x [B, T, D]."""

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.recipe = recipe
        self.q_proj = linear(recipe.model, recipe.heads * recipe.head_dim, rngs)
        self.k_proj = linear(recipe.model, recipe.kv_heads * recipe.head_dim, rngs)
        self.v_proj = linear(recipe.model, recipe.kv_heads * recipe.head_dim, rngs)
        self.o_proj = linear(recipe.heads * recipe.head_dim, recipe.model, rngs, scale=0.01)

    def __call__(self, x: jax.Array, document: jax.Array) -> jax.Array:
        split = functools.partial(jnp.reshape, shape=(*x.shape[:2], -1, self.recipe.head_dim))
        q = rotate(split(self.q_proj(x)), self.recipe.rope_theta)
        k = rotate(split(self.k_proj(x)), self.recipe.rope_theta)
        out = causal_attention(q, k, split(self.v_proj(x)), document)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
    """Gated MLP."""

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.gate_proj = linear(recipe.model, recipe.mlp, rngs)
        self.up_proj = linear(recipe.model, recipe.mlp, rngs)
        self.down_proj = linear(recipe.mlp, recipe.model, rngs, scale=0.01)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.input_layernorm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)
        self.self_attn = Attention(recipe, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(
            recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs
        )
        self.mlp = Mlp(recipe, rngs)

    def __call__(self, x: jax.Array, document: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), document)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """A decoder from tokens [B, T] int32 to logits [B, T, V] float32; the head is the embedding.

    document [B, T] int32 numbers the documents, whose tokens do not see each other. With mixed
    documents a small model is slow to learn that a name has to be copied from its own story.
    """

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        unit = nnx.initializers.normal(recipe.model**-0.5)
        self.embed_tokens = nnx.Embed(recipe.vocab, recipe.model, embedding_init=unit, rngs=rngs)
        self.layers = nnx.List([Layer(recipe, rngs) for _ in range(recipe.layers)])
        self.norm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array, document: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, document)
        return self.embed_tokens.attend(self.norm(x))
