"""Trains a bundled model: a corpus, a tokenizer and a small Llama, saved as a folder.

    python -m training.train --recipe target --out DIR [--minutes 45 | --steps N]
        [--seed 0] [--work DIR]

With --steps the weights depend on seed and steps alone (on one kind of machine). With --minutes the
clock decides how many steps there are, and the learning rate falls with it. An interrupted run
continues from its last checkpoint in the work folder. All models of a seed share their vocabulary.
"""

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from training.corpus import KINDS, LONG, documents
from training.folder import write_folder
from training.loop import Budget, answer_loss, claim, compile_training, fit
from training.recipe import RECIPES, Recipe
from training.tokens import encoded, stream, train_tokenizer


def train(recipe: Recipe, budget: Budget, seed: int, out: Path, work: Path, command: str) -> dict:
    """Write the corpus, train, and write the folder; return the contents of training.json."""
    claim(
        work,
        {"seed": seed, "budget": dataclasses.asdict(budget), "recipe": dataclasses.asdict(recipe)},
    )
    tokenizer = train_tokenizer(recipe, seed)
    short = stream(encoded(tokenizer, documents(seed, "train", recipe.documents)))
    long = stream(encoded(tokenizer, documents(seed, "train", recipe.long_chats, LONG)))
    params, progress = fit(recipe, budget, seed, short, long, work)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    account = {
        "command": command,
        "seed": seed,
        "steps": progress.step,
        "tokens_seen": progress.tokens,
        "minutes": round(progress.seconds / 60, 1),
        "held_out_loss": held_out_losses(recipe, weights, tokenizer, seed),
        "corpus_tokens": len(short.ids) + len(long.ids),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
        "recipe": dataclasses.asdict(recipe),
    }
    write_folder(out, recipe, weights, tokenizer, account)
    return account


def held_out_losses(
    recipe: Recipe, weights: nnx.State, tokenizer: bytes, seed: int
) -> dict[str, float]:
    """Measure the weights as they are stored: nats per answer token, by kind of document."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    losses = compile_training(recipe).losses
    measured = {}
    for kind in (*KINDS, LONG):
        texts = encoded(tokenizer, documents(seed, "held-out", recipe.held_out_documents, kind))
        measured[kind] = round(answer_loss(losses, params, texts, recipe.context), 4)
    return measured


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.train", description="Train a bundled model."
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--recipe", choices=list(RECIPES), default="target", help="which model (default: target)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="checkpoints to continue from when interrupted (default: OUT.work)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of corpus and weights (default: 0)"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--minutes", type=float, default=45.0, help="train for this long (default: 45)"
    )
    end.add_argument("--steps", type=int, help="train for exactly this many steps")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    asked = arguments(argv)
    work = asked.work or asked.out.with_name(asked.out.name + ".work")
    command = shlex.join(["python", "-m", "training.train", *argv])
    try:
        budget = Budget(asked.steps, asked.minutes)
        account = train(RECIPES[asked.recipe], budget, asked.seed, asked.out, work, command)
    except ValueError as error:
        sys.exit(str(error))
    print(
        f"{asked.out}: {account['tokens_seen']} tokens seen, held-out loss "
        f"{account['held_out_loss']}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
