"""The training loop: AdamW with a rate given at every step, so that a clock can end it."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import rich.progress
from flax import nnx
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from training.llama import Llama
from training.recipe import Recipe
from training.tokens import BOS, Encoded, Stream


@dataclass(frozen=True)
class Progress:
    """How far a training has come: steps, tokens and seconds of training."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Budget:
    """The end of a training: a number of steps or, where that is None, minutes of training."""

    steps: int | None
    minutes: float

    def __post_init__(self) -> None:
        length = self.minutes if self.steps is None else self.steps
        if not length > 0:
            raise ValueError(f"{self}: a training has to last; give --steps or --minutes above 0")

    def spent(self, progress: Progress) -> float:
        """Return the share of the budget that is spent, 1 at the end."""
        if self.steps is None:
            return progress.seconds / (60 * self.minutes)
        return progress.step / self.steps


@dataclass(frozen=True)
class Training:
    """Compiled functions of a recipe.

    A state is (parameters, optimizer state), float32 pytrees. start: seed -> state. step: state
    (donated), ids [B, T+1] int32, answer [B, T+1] bool, rate [] -> state, loss of the answers [].
    losses: parameters, ids [B, T+1] int32 -> cross entropy in nats [B, T].
    """

    start: Callable[[int], tuple]
    step: Callable[..., tuple]
    losses: Callable[..., jax.Array]


def compile_training(recipe: Recipe) -> Training:
    """Build the functions of a recipe; they are compiled at their first call."""
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

    def losses(params: nnx.State, ids: jax.Array) -> jax.Array:
        inputs = ids[:, :-1]
        logits = nnx.merge(graph, params)(inputs, jnp.cumsum(inputs == BOS, axis=1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])

    def objective(
        params: nnx.State, ids: jax.Array, answer: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        loss = losses(params, ids)
        is_answer = answer[:, 1:]
        weight = jnp.where(is_answer, 1.0, recipe.question_weight)
        return (loss * weight).sum() / weight.sum(), loss.mean(where=is_answer)

    def step(state: tuple, ids: jax.Array, answer: jax.Array, rate: jax.Array) -> tuple:
        params, moments = state
        (_, answer_mean), gradient = jax.value_and_grad(objective, has_aux=True)(
            params, ids, answer
        )
        update, moments = adamw.update(gradient, moments, params)
        params = jax.tree.map(lambda leaf, change: leaf - rate * change, params, update)
        return (params, moments), answer_mean

    return Training(start, jax.jit(step, donate_argnums=0), jax.jit(losses))


def learning_rate(recipe: Recipe, step: int, spent: float) -> np.float32:
    """Return a linear warm-up by steps times a cosine that is zero where the budget is spent."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    return np.float32(recipe.peak_rate * warm * 0.5 * (1 + math.cos(math.pi * spent)))


def claim(work: Path, run: dict) -> None:
    """Mark a work folder as this run's; ValueError if it has checkpoints of another run."""
    mark = work / "run.json"
    found = json.loads(mark.read_text()) if mark.exists() else run
    if found != run:
        other = {name: value for name, value in found.items() if value != run.get(name)}
        raise ValueError(
            f"{work} holds a run with other settings ({other}); delete it or name another with "
            f"--work"
        )
    work.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(run))


def restore(manager: ocp.CheckpointManager, state: tuple) -> tuple[tuple, Progress]:
    """Return the newest checkpoint, or the given state with no progress."""
    newest = manager.latest_step()
    if newest is None:
        return state, Progress()
    like = {"state": state, "way": dataclasses.asdict(Progress())}
    saved = manager.restore(newest, args=ocp.args.StandardRestore(like))
    return saved["state"], Progress(**saved["way"])


def save(manager: ocp.CheckpointManager, state: tuple, progress: Progress) -> None:
    """Write a checkpoint."""
    saved = {"state": state, "way": dataclasses.asdict(progress)}
    manager.save(progress.step, args=ocp.args.StandardSave(saved))


def progress_bar() -> rich.progress.Progress:
    """Return a bar with the step, the loss, the spent budget and the time."""
    return rich.progress.Progress(
        TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
    )


def fit(
    recipe: Recipe, budget: Budget, seed: int, short: Stream, long: Stream, work: Path
) -> tuple[nnx.State, Progress]:
    """Train until the budget is spent; return the parameters and the progress.

    Most windows are of `short`; every recipe.long_every-th is of `long`.
    """
    training = compile_training(recipe)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with (
        ocp.CheckpointManager(work.absolute() / "steps", options=options) as manager,
        progress_bar() as bar,
    ):
        state, progress = restore(manager, training.start(seed))
        began = time.monotonic() - progress.seconds
        task = bar.add_task("", total=1.0, step=progress.step, loss=math.nan)
        spent = budget.spent(progress)
        while spent < 1:
            is_long = (progress.step + 1) % recipe.long_every == 0
            source, context = (long, recipe.context) if is_long else (short, recipe.short_context)
            ids, answer = source.windows(recipe.batch, context, (seed, progress.step))
            rate = learning_rate(recipe, progress.step, spent)
            state, loss = training.step(state, ids, answer, rate)
            loss = float(loss)  # waits for the step, so that the clock is right
            progress = Progress(
                step=progress.step + 1,
                tokens=progress.tokens + recipe.batch * context,
                seconds=time.monotonic() - began,
            )
            spent = budget.spent(progress)
            bar.update(task, completed=spent, step=progress.step, loss=loss)
            if progress.step % recipe.checkpoint_every == 0:
                save(manager, state, progress)
    return state[0], progress


def answer_loss(
    losses: Callable[..., jax.Array], params: nnx.State, texts: list[Encoded], context: int
) -> float:
    """Return the mean cross entropy in nats over the answers of documents.

    Documents are read one by one, each cut at context + 1 tokens.
    """
    measured = []
    for text in texts:
        length = min(len(text.ids), context + 1)
        # Rows are padded to multiples of 512, since every length is compiled.
        padded = min(-(-length // 512) * 512, context) + 1
        row = np.zeros((1, padded), np.int32)
        row[0, :length] = text.ids[:length]
        loss = np.asarray(losses(params, row))[0, : length - 1]
        measured.append(loss[text.answer[1:length]])
    return float(np.concatenate(measured).mean())
