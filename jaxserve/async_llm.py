"""AsyncLLM: the Python API for coroutines, with the engine on a thread of its own."""

import weakref
from asyncio import wrap_future
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, Unpack

import numpy as np
from jax.sharding import Mesh

from jaxserve.async_calls import CLOSED, AsyncCall, AsyncCalls
from jaxserve.call_guard import CallGuard
from jaxserve.chat import Message
from jaxserve.completion import Completion, Delta
from jaxserve.engine.device.background import compiles_here
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.errors import ConfigError, EngineError
from jaxserve.llm_arguments import OTHER_KEYWORDS, ChatFields, named_conversations, named_prompts
from jaxserve.loaded_llm import LoadedLLM, embeddings_of
from jaxserve.names_elsewhere import LLM_ATTRIBUTES, explains_names
from jaxserve.open_choices import OpenPrompts
from jaxserve.prompts import Prepared, Prompt, is_conversation
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.sharding.mesh import spans_hosts

PATIENCE = 60.0  # seconds for a step, or the compile of one, to end with the interpreter
PREPARES = 4  # prompts that are tokenized at a time


@explains_names(OTHER_KEYWORDS, LLM_ATTRIBUTES)
class AsyncLLM(LoadedLLM):
    """A checkpoint on this machine's devices, for any number of coroutines at once.

    The engine runs on a thread of its own, and all calls run together in it: a call that comes
    while others run joins them at the next step. Coroutines of several event loops, in several
    threads, may share an AsyncLLM; it belongs to none of the loops. A task that is cancelled aborts
    its requests before the next step is planned.

        async with AsyncLLM("folder/of/a/checkpoint") as llm:
            stories = await asyncio.gather(*(llm.generate([prompt]) for prompt in prompts))

    To make one takes as long as to load the checkpoint and blocks the event loop meanwhile; where
    others use the loop: `await asyncio.to_thread(AsyncLLM, "folder/of/a/checkpoint")`. As with LLM
    a call waits until the fewest steps are compiled that its prompts can run with, and so do the
    calls that run already; `warm_up` compiles all steps before. Nothing interrupts the compile of a
    step.

    Close it, or use it with `async with`, to free its device memory. Its arguments and attributes
    are those of LoadedLLM; touch the engine, the runner and the steps before the first call only.
    """

    def _check_mesh(self, mesh: Mesh) -> None:
        if spans_hosts(mesh):
            raise ConfigError(
                "an AsyncLLM runs on the devices of one process, and this mesh has devices of "
                "several, whose calls would have to come in one order (use jaxserve serve)"
            )

    def _start_calls(self) -> Callable[[], None]:
        # Of its own: the program may fill the threads of the event loops, and wait there for calls.
        self._prepares = ThreadPoolExecutor(PREPARES, "prepare")
        self._calls = AsyncCalls(self.engine, self.steps)
        self._thread = EngineThread(
            self.engine,
            self._calls.deliver,
            self._calls.fail_after,
            before_step=self.steps.install,
            ended=self._calls.new_error,
        )
        # Nothing that the thread refers to refers to this object, which ends the thread when it is
        # dropped, or when the interpreter ends.
        self._end_thread = weakref.finalize(self, _end, self._thread, self._guard)
        self._thread.start()
        self._check_usable = partial(_check_usable, self._guard, self._calls)
        return self._check_usable

    # ---- calls

    async def generate(
        self,
        prompts: str | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Generate for prompts and return when the last one is finished; as LLM.generate.

        Args:
            prompts: List of texts, lists of token ids, or conversations; or a single text.
            params: Sampling parameters for all prompts, or one per prompt; None is the default.
            **sampling: Single fields of SamplingParams, which override those of params.

        Returns:
            The completions in the order of the prompts, the n choices of a prompt in a row. A
            choice that failed on the way has its `error` set.

        Raises:
            RequestError: A prompt or its parameters can never run; nothing runs.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The AsyncLLM is closed, or a step has failed.
        """
        named = named_prompts(prompts)
        return await self._complete(partial(self._requests.of_prompts, named, params, sampling))

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of conversations; as LLM.chat.

        Args:
            messages: Conversation, a list of {"role": ..., "content": ...}, or a list of those.
            params: Sampling parameters for all conversations, or one per conversation.
            **fields: Single fields of SamplingParams, which override those of params; and of a
                conversation those of TemplateOptions, such as reasoning_effort.

        Returns:
            The completions, in the order that `generate` returns them in.

        Raises:
            RequestError: A message is malformed, or a prompt can never run.
            ChatError: The chat template is missing, or refuses the messages.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The AsyncLLM is closed, or a step has failed.
        """
        named = named_conversations(messages)
        prepare = partial(self._requests.of_conversations, named, params, fields)
        return await self._complete(prepare)

    async def embed(self, prompts: str | Iterable[str | Sequence[int]]) -> list[np.ndarray]:
        """Return the embedding of every prompt, from a model that embeds; as LLM.embed.

        Args:
            prompts: List of texts or lists of token ids; or a single text.

        Returns:
            One float32 array of shape [D] and Euclidean length 1 per prompt, in their order.

        Raises:
            RequestError: A prompt is a conversation, has no tokens or is too long.
            PurposeError: The model generates text and makes no embeddings.
            EngineError: The AsyncLLM is closed, or a step has failed.
        """
        named = named_prompts(prompts)
        return embeddings_of(await self._complete(partial(self._requests.to_embed, named)))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncGenerator[Delta]:
        """Generate for one prompt and yield the text as it grows.

        Leaving the iterator aborts the request: at once by its `aclose`, otherwise when the event
        loop finds that nothing refers to it.

        Args:
            prompt: Text, token ids or conversation.
            params: Sampling parameters; None is the default.
            **fields: Single fields of SamplingParams, which override those of params; and of a
                conversation those of TemplateOptions, such as reasoning_effort.

        Returns:
            Asynchronous iterator of deltas. The last delta of each of the n choices carries its
            completion. Errors come with the first delta that is asked for.

        Raises:
            RequestError: The prompt or its parameters can never run.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The AsyncLLM is closed, or a step has failed.
        """
        name = "messages" if is_conversation(prompt) else "prompt"
        return self._run(lambda: [self._requests.of_prompt(name, prompt, params, fields)])

    async def warm_up(self) -> None:
        """Compile every step there is, as far as that has not happened yet.

        Calls that run meanwhile wait.

        Raises:
            EngineError: The AsyncLLM is closed, or a step has failed.
            MemoryLimitError: A step needs more memory than the devices have.
        """
        self._check_usable()
        steps = self.steps
        await self._on_engine(lambda _: steps.compile_for(None))

    async def _complete(self, prepare: Callable[[], list[Prepared]]) -> list[Completion]:
        done = {}
        async for delta in self._run(prepare):
            if delta.completion:
                done[delta.prompt_index, delta.index] = delta.completion
        return [done[key] for key in sorted(done)]

    async def _run(self, prepare: Callable[[], list[Prepared]]) -> AsyncGenerator[Delta]:
        """Run prompts and yield their deltas; `prepare` makes them, on another thread."""
        call = AsyncCall(await self._prepare(prepare))
        if not call.prompts:
            return
        calls = self._calls  # jobs of the thread may not refer to this object
        try:
            seeds = calls.add(call)
            self._thread.do(lambda _: calls.submit())
            unfinished = OpenPrompts(
                call.prompts, await wrap_future(seeds), self.model.tokenizer, self._stop
            )
            while unfinished:
                if delta := unfinished.take(await call.next_event()):
                    yield delta
        finally:
            if not self._guard.in_fork:
                self._thread.do(lambda _: calls.leave(call))

    async def _prepare(self, prepare: Callable[[], list[Prepared]]) -> list[Prepared]:
        self._check_usable()
        try:
            prepared = self._prepares.submit(prepare)
        except RuntimeError:
            self._check_usable()  # it was closed since
            raise
        return await wrap_future(prepared)

    def _stop(self, request_id: str, index: int) -> None:
        self._thread.stop(request_id, index)

    async def _on_engine[T](self, function: Callable[[Engine], T]) -> T:
        """Run a function between two steps."""
        return await wrap_future(self._thread.call(function))

    # ---- end

    async def close(self) -> None:
        """End the calls that run with EngineError; free parameters, pages and rows.

        It waits for the step, the compile and the prompts that are worked on. Nothing happens if
        the AsyncLLM is closed already, or in a fork of the process that made it.
        """
        if self._guard.in_fork:
            return
        closing = ThreadPoolExecutor(1, "close")
        try:
            await wrap_future(closing.submit(self._close))
        finally:
            closing.shutdown(wait=False)

    def _close(self) -> None:
        self._guard.close(CLOSED)
        calls = self._calls
        try:
            self._thread.call(lambda _: calls.fail(CLOSED)).result()
        except EngineError:  # the thread has ended: a step failed, or it is closed already
            calls.fail(CLOSED)
        self._end_thread.detach()
        self._thread.close(timeout=None)
        self._prepares.shutdown()
        with self._guard:
            self._free()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _check_usable(guard: CallGuard, calls: AsyncCalls) -> None:
    """Raise EngineError if no call can run any more, or in a fork."""
    guard.check_process()
    calls.check_usable()


def _end(thread: EngineThread, guard: CallGuard) -> None:
    """End the thread of an AsyncLLM that nothing refers to, or of one that was not closed."""
    if guard.in_fork:
        return
    guard.close(CLOSED)
    if compiles_here():
        # Garbage collection runs this on whatever thread it comes to, and the engine may wait for
        # this one.
        thread.close(timeout=0.0)
    else:
        thread.close(PATIENCE)
