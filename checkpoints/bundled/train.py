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
    mlp: int = 256  # F
    layers: int = 4
    heads: int = 8  # N
    kv_heads: int = 4  # K
    head_dim: int = 16  # H
    context: int = 512  # T
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    batch: int = 1  # B: at this size many small steps learn more from a token than few large ones
    peak_rate: float = 4e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    checkpoint_every: int = 500


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
    half = x.shape[3] // 2
    frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequency)[None, :, None, :]  # [1, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int = 64) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H].

    A block of queries meets only the keys up to its end: half the work, and scores small enough for a CPU's cache.
    """
    blocks = []
    for start in range(0, q.shape[1], block):
        stop = min(start + block, q.shape[1])
        seen = jnp.tri(stop - start, stop, start, dtype=bool)
        blocks.append(jax.nn.dot_product_attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask=seen[None, None]))
    return jnp.concatenate(blocks, axis=1)


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
        return self.o_proj(causal_attention(q, k, split(self.v_proj(x))).reshape(*x.shape[:2], -1))


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


# The data: one stream of BOS, document, EOS, cut into windows.


def train_tokenizer(recipe: Recipe, seed: int) -> bytes:
    """A SentencePiece BPE model with byte fallback, serialized; a newline is left to its byte."""
    paragraphs = (line for text in documents(seed, "train", recipe.tokenizer_documents) for line in text.split("\n"))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=paragraphs,
        model_writer=model,
        model_type="bpe",
        vocab_size=recipe.vocab,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        num_threads=1,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        minloglevel=2,
    )
    return model.getvalue()


def token_stream(tokenizer: bytes, texts: Iterable[str]) -> np.ndarray:
    """[tokens] uint16: the documents one after the other, each between BOS and EOS."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    return np.concatenate([np.array([BOS, *processor.encode(text), EOS], np.uint16) for text in texts])


def batches(stream: np.ndarray, recipe: Recipe, seed: int, step: int) -> Iterator[np.ndarray]:
    """For ever: [B, T+1] int32 windows that begin with a document; each depends on seed and its step alone."""
    window = recipe.context + 1
    starts = np.flatnonzero(stream[: len(stream) - recipe.context] == BOS)
    for index in itertools.count(step):
        drawn = np.random.default_rng((seed, index)).choice(starts, recipe.batch)
        yield stream[drawn[:, None] + np.arange(window)].astype(np.int32)


# The training: AdamW under a rate given at every step, so that a clock may end the schedule.


@dataclass(frozen=True)
class Training:
    """One recipe's compiled functions. A state is (parameters, optimizer state), float32 pytrees."""

    start: Callable[[int], tuple]  # seed -> state
    step: Callable[..., tuple]  # state (donated), tokens [B, T+1] int32, rate [] -> state, loss []
    loss: Callable[..., jax.Array]  # parameters, tokens [1, T+1] int32 -> mean cross entropy in nats []


def compile_training(recipe: Recipe) -> Training:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(recipe, nnx.Rngs(0))))
    matrices = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    adamw = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(recipe.weight_decay, mask=matrices),
    )

    def start(seed: int) -> tuple:
        params = nnx.state(Llama(recipe, nnx.Rngs(seed)), nnx.Param)
        return params, adamw.init(params)

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: tuple, tokens: jax.Array, rate: jax.Array) -> tuple:
        params, moments = state
        mean, gradient = jax.value_and_grad(loss)(params, tokens)
        update, moments = adamw.update(gradient, moments, params)
        params = jax.tree.map(lambda leaf, change: leaf - rate * change, params, update)
        return (params, moments), mean

    return Training(start, jax.jit(step, donate_argnums=0), jax.jit(loss))


def learning_rate(recipe: Recipe, step: int, progress: float) -> np.float32:
    """A linear warm-up by steps times a cosine that reaches zero where progress is 1."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    return np.float32(recipe.peak_rate * warm * 0.5 * (1 + math.cos(math.pi * progress)))


def claim(work: Path, run: dict) -> None:
    """Marks a work folder as this run's; ValueError if another run's checkpoints lie there."""
    mark = work / "run.json"
    if mark.exists() and (found := json.loads(mark.read_text())) != run:
        other = {name: value for name, value in found.items() if value != run.get(name)}
        raise ValueError(f"{work} holds a run with other settings ({other}); delete it or name another with --work")
    work.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(run))


def restore(manager: ocp.CheckpointManager, state: tuple) -> tuple[tuple, int, float]:
    """The newest checkpoint's state, step and seconds of training, or the given state at step 0."""
    newest = manager.latest_step()
    if newest is None:
        return state, 0, 0.0
    saved = manager.restore(newest, args=ocp.args.StandardRestore({"state": state, "seconds": 0.0}))
    return saved["state"], newest, saved["seconds"]


def progress_bar() -> Progress:
    text = TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}")
    return Progress(text, BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())


def fit(recipe: Recipe, budget: Budget, seed: int, stream: np.ndarray, work: Path) -> tuple[nnx.State, dict]:
    """Trains until the budget is spent; the parameters, and what training.json says of the way there."""
    training = compile_training(recipe)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    loss = math.nan
    with ocp.CheckpointManager(work.absolute() / "steps", options=options) as manager, progress_bar() as bar:
        state, step, seconds = restore(manager, training.start(seed))
        began = time.monotonic() - seconds
        task = bar.add_task("", total=1.0, step=step, loss=loss)
        for tokens in batches(stream, recipe, seed, step):
            progress = budget.progress(step, time.monotonic() - began)
            bar.update(task, completed=progress, step=step, loss=loss)
            if progress >= 1:
                break
            state, mean = training.step(state, tokens, learning_rate(recipe, step, progress))
            step, loss = step + 1, float(mean)
            if step % recipe.checkpoint_every == 0:
                manager.save(step, args=ocp.args.StandardSave({"state": state, "seconds": time.monotonic() - began}))
    seen = step * recipe.batch * recipe.context
    minutes = round((time.monotonic() - began) / 60, 1)
    return state[0], {"steps": step, "tokens_seen": seen, "minutes": minutes}


def held_out_loss(recipe: Recipe, params: nnx.State, stream: np.ndarray) -> float:
    """Mean cross entropy in nats per token, over the stream's windows of T tokens."""
    loss = compile_training(recipe).loss
    rows = np.arange(0, len(stream) - recipe.context, recipe.context)[:, None] + np.arange(recipe.context + 1)
    return float(np.mean([loss(params, stream[row].astype(np.int32)[None]) for row in rows]))


# The folder, in Hugging Face's layout.


def tensors(weights: nnx.State) -> dict[str, jax.Array]:
    """Tensors by their Hugging Face names; a linear layer's weight is stored [outputs, inputs]."""
    named = {}
    for path, leaf in nnx.to_flat_state(weights):
        name = ".".join(["model", *map(str, path[:-1]), "weight"])
        named[name] = leaf[...].T if path[-1] == "kernel" else leaf[...]
    return named


def model_config(recipe: Recipe) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.model,
        "intermediate_size": recipe.mlp,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.context,
        "rms_norm_eps": recipe.norm_epsilon,
        "rope_theta": recipe.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def tokenizer_config(recipe: Recipe) -> dict:
    return {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "model_max_length": recipe.context,
    }


def write_folder(out: Path, recipe: Recipe, weights: nnx.State, tokenizer: bytes, account: dict) -> None:
    jsons = {
        "config.json": model_config(recipe),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS},
        "tokenizer_config.json": tokenizer_config(recipe),
        "training.json": account,
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in jsons.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "tokenizer.model").write_bytes(tokenizer)
    save_file(tensors(weights), out / "model.safetensors", metadata={"format": "pt"})


def train(recipe: Recipe, budget: Budget, seed: int, out: Path, work: Path, command: str) -> dict:
    """Everything from the corpus to the folder; returns what it wrote to training.json."""
    claim(work, {"seed": seed, "budget": dataclasses.asdict(budget), "recipe": dataclasses.asdict(recipe)})
    tokenizer = train_tokenizer(recipe, seed)
    stream = token_stream(tokenizer, documents(seed, "train", recipe.documents))
    params, way = fit(recipe, budget, seed, stream, work)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    held_out = token_stream(tokenizer, documents(seed, "held-out", recipe.held_out_documents))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    account = {
        "command": command,
        "seed": seed,
        **way,
        "held_out_loss": round(held_out_loss(recipe, rounded, held_out), 4),
        "held_out_tokens": len(held_out),
        "corpus_tokens": len(stream),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
        "recipe": dataclasses.asdict(recipe),
    }
    write_folder(out, recipe, weights, tokenizer, account)
    return account


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checkpoints.bundled.train", description="Train the bundled model.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--work", type=Path, help="checkpoints to go on from when interrupted (default: OUT.work)")
    parser.add_argument("--seed", type=int, default=0)
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--minutes", type=float, default=10.0, help="train for this long (default: 10)")
    end.add_argument("--steps", type=int, help="train for exactly this many steps")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    asked = arguments(argv)
    work = asked.work or asked.out.with_name(asked.out.name + ".work")
    command = shlex.join(["python", "-m", "checkpoints.bundled.train", *argv])
    try:
        account = train(Recipe(), Budget(asked.steps, asked.minutes), asked.seed, asked.out, work, command)
    except ValueError as error:
        sys.exit(str(error))
    print(f"{asked.out}: {account['tokens_seen']} tokens seen, held-out loss {account['held_out_loss']}")


if __name__ == "__main__":
    main(sys.argv[1:])
