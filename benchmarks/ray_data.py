"""Rows per second of Ray Data with two replicas, beside one engine and two that are fed by hand.

python -m benchmarks.ray_data --rows 3000

Everything runs on this machine, one after the other. Engines that are fed by hand have answered a
batch before; of Ray Data the second half is timed, when both of its actors have loaded and
compiled.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from typing import Any

import ray
import ray.data

from jaxserve import AsyncLLM
from jaxserve.ray import generate_rows

BUNDLED = "checkpoints/bundled/tiny-chat-draft"
REPLICAS = 2
OPTIONS = {"dtype": "float32"}
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
BATCH = 32
IN_FLIGHT = 4


@ray.remote
class Engine:
    """Engine that is fed by hand."""

    def __init__(self, model: str):
        self._llm = AsyncLLM(model, **OPTIONS)

    async def generate(self, prompts: list[str]) -> None:
        """Generate for prompts, as many at a time as Ray Data gives to an actor."""
        places = asyncio.Semaphore(BATCH * IN_FLIGHT)

        async def one(prompt: str) -> None:
            async with places:
                await self._llm.generate(prompt, **SAMPLING)

        await asyncio.gather(*map(one, prompts))


def by_hand(engines: list[Any], prompts: list[str]) -> float:
    """Return rows per second of engines that get equal shares of the prompts."""
    ray.get([engine.generate.remote(prompts[:BATCH]) for engine in engines])  # compiles
    shares = [prompts[i :: len(engines)] for i in range(len(engines))]
    began = time.perf_counter()
    ray.get([engine.generate.remote(s) for engine, s in zip(engines, shares, strict=True)])
    return len(prompts) / (time.perf_counter() - began)


def by_ray_data(model: str, prompts: list[str]) -> float:
    """Return rows per second of Ray Data in the second half of the rows."""
    rows = ray.data.from_items([{"prompt": prompt} for prompt in prompts])
    answered = generate_rows(
        rows,
        model,
        replicas=REPLICAS,
        options=OPTIONS,
        batch_size=BATCH,
        batches_in_flight=IN_FLIGHT,
        **SAMPLING,
    )
    times = [time.perf_counter() for _ in blocks(answered)]
    middle = len(times) // 2
    return (len(prompts) - BATCH * (middle + 1)) / (times[-1] - times[middle])


def blocks(dataset: ray.data.Dataset) -> Iterator[Any]:
    """Yield the batches of a dataset as they come."""
    return iter(dataset.iter_batches(batch_size=BATCH, prefetch_batches=0))


def main() -> None:
    """Measure in turns, and print the rates of each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED, metavar="DIR")
    parser.add_argument("--rows", type=int, default=3000, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    args = parser.parse_args()
    prompts = [f"Story {i}: once upon a time" for i in range(args.rows)]
    ray.init(num_cpus=4, log_to_driver=False)
    for repeat in range(args.repeats):
        engines = [Engine.remote(args.model) for _ in range(REPLICAS)]
        one = by_hand(engines[:1], prompts)
        two = by_hand(engines, prompts)
        for engine in engines:
            ray.kill(engine)
        data = by_ray_data(args.model, prompts)
        print(f"{repeat}: one {one:.1f}, two by hand {two:.1f}, Ray Data {data:.1f} rows/s")


if __name__ == "__main__":
    main()
