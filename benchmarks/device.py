"""Name, versions and measured limits of the first device of this machine."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.bench import environment
from jaxserve.plan.topology import Limits


def seconds(
    run: Callable[[], Any], repeats: int, rounds: int = 5, before: Callable[[], None] = lambda: None
) -> float:
    """Return the seconds of one call, the least of several rounds.

    The calls of a round are launched together. before: is called ahead of each round.
    """
    before()
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(rounds):
        before()
        began = time.perf_counter()
        for _ in range(repeats):
            out = run()
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def measure_limits(dtype: jnp.dtype) -> Limits:
    """Return the limits of products of this dtype with float32 accumulation.

    bandwidth: the faster of summing a large array and of negating it in place (read and written
    bytes). flops: of a square product of random numbers: a GPU is faster on equal ones, which take
    less power.
    """
    large = jax.default_backend() != "cpu"
    size, width = (2**30, 8192) if large else (2**28, 1024)
    a = jax.random.normal(jax.random.key(0), (width, width), jnp.float32).astype(dtype)
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None  # as the model asks
    product = jax.jit(lambda a: jnp.dot(a, a, precision=exact, preferred_element_type=jnp.float32))
    return Limits(_bandwidth(size), 2 * width**3 / seconds(lambda: product(a), 10))


def _bandwidth(size: int) -> float:
    """Return the bandwidth; arrays are donated, since a new one costs a CPU its page faults."""
    arrays = [jnp.zeros(size // 4, jnp.float32)]
    negate, total = jax.jit(lambda x: -x, donate_argnums=0), jax.jit(lambda x: x.sum())

    def negate_in_place() -> jax.Array:
        arrays[0] = negate(arrays[0])
        return arrays[0]

    return max(
        size / seconds(lambda: total(arrays[0]), 10), 2 * size / seconds(negate_in_place, 10)
    )


def about() -> dict[str, str]:
    """Return the device's name and `versions`."""
    return {"device": jax.devices()[0].device_kind} | versions()


def versions() -> dict[str, str]:
    """Return the versions of jaxserve and its libraries, for a file of results.

    COMMIT in the environment names the commit of a copy without git.
    """
    return environment.versions() | {"commit": os.environ.get("COMMIT") or _commit() or "unknown"}


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
