"""Threads for work that takes too long for the event loop, and bounds on what waits for them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jaxserve.errors import QueueFullError

MAX_TOKENIZE_CALLS = 64  # calls of Tokenize and Detokenize that wait for their turn
MAX_UNCOMPILED = 64  # requests whose grammars wait for their turn
RETRY_SECONDS = 1.0  # after which a refused client may try again


class Workers:
    """Thread pools by kind of work, so that one kind does not hold up the admission of requests.

    Lives on the event loop.
    """

    def __init__(self) -> None:
        # For prompts of requests on their way into the engine.
        self._tokenizing = ThreadPoolExecutor(2, "tokenize")
        self._compiling = ThreadPoolExecutor(1, "grammars")
        # For everything that belongs to no waiting request.
        self._background = ThreadPoolExecutor(1, "background")
        self._tokenize_calls = 0
        self._uncompiled = 0

    async def tokenize[T](self, work: "partial[T]") -> T:
        """Run work that a waiting request needs and that a thread does fast."""
        return await _run(self._tokenizing, work)

    async def compile_grammar[T](self, work: "partial[T]") -> T:
        """Compile a grammar, one after the other; QueueFullError when too many wait."""
        if self._uncompiled >= MAX_UNCOMPILED:
            raise QueueFullError(
                f"{MAX_UNCOMPILED} grammars wait to be compiled already", RETRY_SECONDS
            )
        self._uncompiled += 1
        try:
            return await _run(self._compiling, work)
        finally:
            self._uncompiled -= 1

    async def serve_tokenize_call[T](self, work: "partial[T]") -> T:
        """Run a call of Tokenize or Detokenize; QueueFullError when too many wait."""
        if self._tokenize_calls >= MAX_TOKENIZE_CALLS:
            raise QueueFullError(
                f"{MAX_TOKENIZE_CALLS} calls wait to be tokenized already", RETRY_SECONDS
            )
        self._tokenize_calls += 1
        try:
            return await self.run_in_background(work)
        finally:
            self._tokenize_calls -= 1

    async def run_in_background[T](self, work: "partial[T]") -> T:
        """Run long work that belongs to no waiting request."""
        return await _run(self._background, work)

    def close(self) -> None:
        """Drop what waits and wait for what runs."""
        for executor in (self._tokenizing, self._compiling, self._background):
            executor.shutdown(cancel_futures=True)


async def _run[T](executor: ThreadPoolExecutor, work: "partial[T]") -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work)
