"""The training: AdamW under a rate given at every step, so that a clock may end the schedule."""

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
from flax import nnx
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from training.llama import Llama
from training.recipe import Recipe
from training.tokens import BOS, Encoded, Stream


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


@dataclass(frozen=True)
class Training:
    """One recipe's compiled functions. A state is (parameters, optimizer state), float32
    pytrees."""

    start: Callable[[int], tuple]  # seed -> state
    step: Callable[
        ..., tuple
    ]  # state (donated), ids, answer [B, T+1], rate [] -> state, loss of the answers []
    losses: Callable[
        ..., jax.Array
    ]  # parameters, ids [B, T+1] int32 -> cross entropy in nats [B, T]


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

    def losses(params: nnx.State, ids: jax.Array) -> jax.Array:
        inputs = ids[:, :-1]
        logits = nnx.merge(graph, params)(inputs, jnp.cumsum(inputs == BOS, axis=1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])

    def objective(
        params: nnx.State, ids: jax.Array, answer: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        loss, told = losses(params, ids), answer[:, 1:]
        weight = jnp.where(told, 1.0, recipe.question_weight)
        return (loss * weight).sum() / weight.sum(), loss.mean(where=told)

    def step(state: tuple, ids: jax.Array, answer: jax.Array, rate: jax.Array) -> tuple:
        params, moments = state
        (_, told), gradient = jax.value_and_grad(objective, has_aux=True)(params, ids, answer)
        update, moments = adamw.update(gradient, moments, params)
        params = jax.tree.map(lambda leaf, change: leaf - rate * change, params, update)
        return (params, moments), told

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
        raise ValueError(
            f"{work} holds a run with other settings ({other}); delete it or name another with "
            f"--work"
        )
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
    manager.save(
        way.step, args=ocp.args.StandardSave({"state": state, "way": dataclasses.asdict(way)})
    )


def progress_bar() -> Progress:
    text = TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}")
    return Progress(text, BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())


def fit(
    recipe: Recipe, budget: Budget, seed: int, short: Stream, long: Stream, work: Path
) -> tuple[nnx.State, Way]:
    """Trains until the budget is spent, on windows of `short` and now and then of `long`; what it
    got, how far.
    """
    training = compile_training(recipe)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with (
        ocp.CheckpointManager(work.absolute() / "steps", options=options) as manager,
        progress_bar() as bar,
    ):
        state, way = restore(manager, training.start(seed))
        began = time.monotonic() - way.seconds
        task = bar.add_task("", total=1.0, step=way.step, loss=math.nan)
        while (progress := budget.progress(way)) < 1:
            is_long = (way.step + 1) % recipe.long_every == 0
            source, context = (long, recipe.context) if is_long else (short, recipe.short_context)
            ids, answer = source.windows(recipe.batch, context, (seed, way.step))
            state, loss = training.step(
                state, ids, answer, learning_rate(recipe, way.step, progress)
            )
            loss = float(loss)  # waits for the step, so that the clock is right
            way = Way(way.step + 1, way.tokens + recipe.batch * context, time.monotonic() - began)
            bar.update(task, completed=budget.progress(way), step=way.step, loss=loss)
            if way.step % recipe.checkpoint_every == 0:
                save(manager, state, way)
    return state[0], way


def answer_loss(
    losses: Callable[..., jax.Array], params: nnx.State, texts: list[Encoded], context: int
) -> float:
    """Mean cross entropy in nats over the answers of documents read one by one, each cut at context
    + 1 tokens.
    """
    measured = []
    for text in texts:
        length = min(len(text.ids), context + 1)
        row = np.zeros(
            (1, min(-(-length // 512) * 512, context) + 1), np.int32
        )  # few lengths, so few compilations
        row[0, :length] = text.ids[:length]
        measured.append(np.asarray(losses(params, row))[0, : length - 1][text.answer[1:length]])
    return float(np.concatenate(measured).mean())
