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
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable
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
from safetensors.flax import save as safetensors_bytes

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
    context: int = 512  # T of every tenth window, whose documents see each other: the longest context trained on
    short_context: int = 256  # T of the others, whose documents are alone
    long_every: int = 10
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    batch: int = 1  # B: at this size many small steps learn more from a token than few large ones
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    checkpoint_every: int = 500


@dataclass(frozen=True)
class Way:
    """How far a training has come."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Budget:
    """What ends the training: a number of steps or, where that is None, minutes of training."""

    steps: int | None
    minutes: float

    def __post_init__(self) -> None:
        if not (self.minutes if self.steps is None else self.steps) > 0:
            raise ValueError(f"{self}: a training has to last; give --steps or --minutes above 0")

    def progress(self, way: Way) -> float:
        return way.seconds / (60 * self.minutes) if self.steps is None else way.step / self.steps


# The model. Attributes are named as in Hugging Face's LlamaForCausalLM, so that paths are tensor names.


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions 0..T-1 on x [B, T, heads, H], pairing dimension i with i + H/2 (arXiv 2104.09864)."""
    half = x.shape[3] // 2
    frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequency)[None, :, None, :]  # [1, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array, block: int = 64) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, K, H], document [B, T] int32 -> [B, T, N, H]; a token sees its own document.

    A block of queries meets only the keys up to its end: half the work, and scores small enough for a CPU's cache.
    """
    blocks = []
    for start in range(0, q.shape[1], block):
        stop = min(start + block, q.shape[1])
        past = jnp.tri(stop - start, stop, start, dtype=bool)[None]
        seen = past & (document[:, start:stop, None] == document[:, None, :stop])
        blocks.append(jax.nn.dot_product_attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask=seen[:, None]))
    return jnp.concatenate(blocks, axis=1)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    spread = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=spread, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.recipe = recipe
        self.q_proj = linear(recipe.model, recipe.heads * recipe.head_dim, rngs)
        self.k_proj = linear(recipe.model, recipe.kv_heads * recipe.head_dim, rngs)
        self.v_proj = linear(recipe.model, recipe.kv_heads * recipe.head_dim, rngs)
        self.o_proj = linear(recipe.heads * recipe.head_dim, recipe.model, rngs, scale=0.01)

    def __call__(self, x: jax.Array, document: jax.Array) -> jax.Array:  # [B, T, D]
        split = functools.partial(jnp.reshape, shape=(*x.shape[:2], -1, self.recipe.head_dim))
        q = rotate(split(self.q_proj(x)), self.recipe.rope_theta)
        k = rotate(split(self.k_proj(x)), self.recipe.rope_theta)
        return self.o_proj(causal_attention(q, k, split(self.v_proj(x)), document).reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.gate_proj = linear(recipe.model, recipe.mlp, rngs)
        self.up_proj = linear(recipe.model, recipe.mlp, rngs)
        self.down_proj = linear(recipe.mlp, recipe.model, rngs, scale=0.01)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        self.input_layernorm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)
        self.self_attn = Attention(recipe, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)
        self.mlp = Mlp(recipe, rngs)

    def __call__(self, x: jax.Array, document: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), document)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """tokens [B, T] int32, alone [] bool -> logits [B, T, V] float32; the head is the embedding.

    `alone` hides the documents of a window from each other: while they are mixed a small model is slow to find out
    that a name is to be copied from its own story.
    """

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs):
        unit = nnx.initializers.normal(recipe.model**-0.5)
        self.embed_tokens = nnx.Embed(recipe.vocab, recipe.model, embedding_init=unit, rngs=rngs)
        self.layers = nnx.List([Layer(recipe, rngs) for _ in range(recipe.layers)])
        self.norm = nnx.RMSNorm(recipe.model, epsilon=recipe.norm_epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array, alone: jax.Array) -> jax.Array:
        document = jnp.where(alone, jnp.cumsum(tokens == BOS, axis=1), 0)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, document)
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


def encoded(tokenizer: bytes, texts: Iterable[str]) -> list[np.ndarray]:
    """[tokens] uint16 for each document: BOS, its text, EOS."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    return [np.array([BOS, *processor.encode(text), EOS], np.uint16) for text in texts]


def windows(stream: np.ndarray, starts: np.ndarray, rows: int, context: int, key: tuple[int, int]) -> np.ndarray:
    """[rows, context + 1] int32 from starts of documents in the stream, drawn by the key (seed, step) alone."""
    whole = np.searchsorted(starts, len(stream) - context)  # the first start with too little behind it
    drawn = starts[np.random.default_rng(key).integers(whole, size=rows)]
    return stream[drawn[:, None] + np.arange(context + 1)].astype(np.int32)


# The training: AdamW under a rate given at every step, so that a clock may end the schedule.


@dataclass(frozen=True)
class Training:
    """One recipe's compiled functions. A state is (parameters, optimizer state), float32 pytrees."""

    start: Callable[[int], tuple]  # seed -> state
    step: Callable[..., tuple]  # state (donated), tokens [B, T+1] int32, alone [] bool, rate [] -> state, loss []
    losses: Callable[..., jax.Array]  # parameters, tokens [B, T+1], alone [] -> cross entropy in nats [B, T]


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

    def losses(params: nnx.State, tokens: jax.Array, alone: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1], alone)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    def step(state: tuple, tokens: jax.Array, alone: jax.Array, rate: jax.Array) -> tuple:
        params, moments = state
        mean, gradient = jax.value_and_grad(lambda params: losses(params, tokens, alone).mean())(params)
        update, moments = adamw.update(gradient, moments, params)
        params = jax.tree.map(lambda leaf, change: leaf - rate * change, params, update)
        return (params, moments), mean

    return Training(start, jax.jit(step, donate_argnums=0), jax.jit(losses))


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


def restore(manager: ocp.CheckpointManager, state: tuple) -> tuple[tuple, Way]:
    """The newest checkpoint, or the given state at the beginning of the way."""
    newest = manager.latest_step()
    if newest is None:
        return state, Way()
    like = {"state": state, "way": dataclasses.asdict(Way())}
    saved = manager.restore(newest, args=ocp.args.StandardRestore(like))
    return saved["state"], Way(**saved["way"])


def save(manager: ocp.CheckpointManager, state: tuple, way: Way) -> None:
    manager.save(way.step, args=ocp.args.StandardSave({"state": state, "way": dataclasses.asdict(way)}))


def progress_bar() -> Progress:
    text = TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}")
    return Progress(text, BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())


def fit(recipe: Recipe, budget: Budget, seed: int, stream: np.ndarray, work: Path) -> tuple[nnx.State, Way]:
    """Trains until the budget is spent; the parameters, and how far that was."""
    training = compile_training(recipe)
    starts = np.flatnonzero(stream == BOS)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager(work.absolute() / "steps", options=options) as manager, progress_bar() as bar:
        state, way = restore(manager, training.start(seed))
        began = time.monotonic() - way.seconds
        task = bar.add_task("", total=1.0, step=way.step, loss=math.nan)
        while (progress := budget.progress(way)) < 1:
            alone = (way.step + 1) % recipe.long_every != 0
            context = recipe.short_context if alone else recipe.context
            tokens = windows(stream, starts, recipe.batch, context, (seed, way.step))
            state, loss = training.step(state, tokens, alone, learning_rate(recipe, way.step, progress))
            loss = float(loss)  # waits for the step, so that the clock is right
            way = Way(way.step + 1, way.tokens + recipe.batch * context, time.monotonic() - began)
            bar.update(task, completed=budget.progress(way), step=way.step, loss=loss)
            if way.step % recipe.checkpoint_every == 0:
                save(manager, state, way)
    return state[0], way


def held_out_loss(recipe: Recipe, params: nnx.State, texts: list[np.ndarray]) -> float:
    """Mean cross entropy in nats over the tokens after BOS of documents read one by one, each cut at T + 1 tokens."""
    losses = compile_training(recipe).losses
    measured = []
    for text in texts:
        row = np.full((1, recipe.context + 1), EOS, np.int32)
        length = min(len(text), row.size)
        row[0, :length] = text[:length]
        measured.append(np.asarray(losses(params, row, True))[0, : length - 1])
    return float(np.concatenate(measured).mean())


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
    (out / "model.safetensors").write_bytes(safetensors_bytes(tensors(weights), metadata={"format": "pt"}))


def train(recipe: Recipe, budget: Budget, seed: int, out: Path, work: Path, command: str) -> dict:
    """Everything from the corpus to the folder; returns what it wrote to training.json."""
    claim(work, {"seed": seed, "budget": dataclasses.asdict(budget), "recipe": dataclasses.asdict(recipe)})
    tokenizer = train_tokenizer(recipe, seed)
    stream = np.concatenate(encoded(tokenizer, documents(seed, "train", recipe.documents)))
    params, way = fit(recipe, budget, seed, stream, work)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    held_out = encoded(tokenizer, documents(seed, "held-out", recipe.held_out_documents))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    account = {
        "command": command,
        "seed": seed,
        "steps": way.step,
        "tokens_seen": way.tokens,
        "minutes": round(way.seconds / 60, 1),
        "held_out_loss": round(held_out_loss(recipe, rounded, held_out), 4),
        "held_out_tokens": sum(len(text) - 1 for text in held_out),
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
