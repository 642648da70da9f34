"""LLM, the Python API: prompts and conversations in, completions or embeddings out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from jax.typing import DTypeLike
from rich.console import Console

from jaxserve.backends import devices as found_devices
from jaxserve.call_guard import CallGuard
from jaxserve.chat import Chat, Message, Rendered
from jaxserve.checkpoints.hub.names import Given, display_name
from jaxserve.compilation_cache import cache_of_llm, compiled_steps_kept
from jaxserve.completion import Completion, Delta
from jaxserve.config import EngineOptions, check_draft_model
from jaxserve.delta_streams import DeltaStreams, with_bar
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.build import NewRunner, build_engine
from jaxserve.engine.device.draft_model import DraftModel
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.engine.step_costs import measure
from jaxserve.engine.trace import StepTrace, write_trace
from jaxserve.errors import RequestError
from jaxserve.llm_arguments import (
    OTHER_KEYWORDS,
    dtype_name,
    mesh_of,
    named_conversations,
    named_prompts,
    options_of,
    params_of,
    params_of_each,
)
from jaxserve.llm_folder import model_of_llm
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.draft import open_draft
from jaxserve.loading.folder import Model, ModelFiles, load, open_model
from jaxserve.loading.model_folder import check_architecture, model_folder
from jaxserve.names_elsewhere import LLM_ATTRIBUTES, explains_names
from jaxserve.progress import Bar
from jaxserve.prompts import Prepared, Prompt, Prompts, is_conversation
from jaxserve.request import SamplingFields, SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.structure.grammars import DEFAULT_BOUNDS, Bounds, Grammars


def _load_draft(files: ModelFiles | None, model: Model, told: Progress) -> Model | None:
    """Load the draft model, if any, in the model's dtype; what is stored quantized stays so."""
    return load(files, model.mesh, model.dtype, told) if files else None


@explains_names(OTHER_KEYWORDS, LLM_ATTRIBUTES)
class LLM:
    """A checkpoint on this machine's devices, ready to generate text or to embed.

    Close it, or use it as a context manager, to free its device memory. Steps are compiled when the
    first prompts that need them come, before any of these prompts runs. Threads may share an LLM:
    each call, and each step of `stream` and `run`, waits for those of other threads. Forks may not.
    A Ctrl-C takes effect between two steps: the call raises KeyboardInterrupt, its requests are
    aborted, and the next call is answered as if nothing had happened. For this a call on the main
    thread replaces the handler of SIGINT until it ends. A second Ctrl-C, five seconds after one
    that had no effect, ends a step that hangs, and the engine with it.

    No environment variable is set. While it loads and compiles, jax.config names the folder of its
    compiled steps, unless the program, or JAX_COMPILATION_CACHE_DIR, names one already; afterwards
    jax.config is as it was before.

    Args:
        model: Folder of a checkpoint as Hugging Face publishes it, or as jaxserve convert writes
            it; or, where there is no such folder, org/name[@revision] of a model on the hub, which
            is fetched into the hub's cache.
        dtype: Type to compute in: "auto" (as the checkpoint says), "float32" or "bfloat16", or
            jax's own object of it.
        weights: Type to hold the weights in: "auto" (as stored), or a quantization such as "int8",
            "fp8", "int4" or "int4-g32".
        max_context: The longest prompt plus output, in tokens; None is the model's.
        data: Devices along the mesh axis that shares the rows and their pages.
        expert: Devices along the axis that shares the experts, and the rows as well.
        tensor: Devices along the axis that shares every layer's weights and KV heads.
        options: Sizes and features of the engine; None takes the defaults.
        mesh: MeshSpec instead of data, expert and tensor.
        devices: Devices of which the mesh takes the first ones; None is all that JAX sees.
        chat_template: File to use instead of the folder's chat template.
        tool_parser: Format of tool calls in answers, "auto" or one of TOOL_PARSERS. A server takes
            answers apart by it; completions of this class keep their text whole.
        reasoning_parser: Format of reasoning in answers, one of REASONING_PARSERS; as above.
        draft_model: Folder or name of a smaller model with the same vocabulary, for options that
            let it draft tokens.
        grammar_bounds: Limits on the size, compile time and cache of structured output.
        compilation_cache: Folder that keeps compiled steps for the next start, unless the program
            or JAX_COMPILATION_CACHE_DIR has chosen one for jax. "auto" is jaxserve/xla in the
            user's cache, the folder of the commands; None keeps nothing.
        progress: Show bars while a model is fetched, the checkpoint is loaded, steps are compiled
            and `generate`, `chat` or `embed` runs: on a terminal's standard error and in notebooks,
            nowhere else.
        on_load: Function called with (done, total, what) while the checkpoint is loaded, instead
            of a bar.
        on_compile: Function called so while steps are compiled, instead of a bar.
        new_runner: Factory of the object that drives the devices.
        digests: Digests of the model's weights to add up while they are read, for programs that
            compare the weights of several processes.

    The attributes are for programs that drive the engine themselves, as the server and the
    benchmarks do. Names and methods of these objects may change with every version.

    Attributes:
        model: The loaded checkpoint: architecture, parameters, tokenizer and end tokens.
        draft: The loaded draft model; None without one.
        digests: Digests of the model's weights, where they were asked for.
        engine: Engine that plans the steps.
        runner: Runner that launches the steps on the devices, with the engine's configuration, its
            compiled shapes and figures.
        prompts: Tokenizer, chat template and limits, by which requests are made of prompts.

    Raises:
        CheckpointError: The files of the checkpoint are damaged or incomplete, or the hub does not
            have the model.
        TokenizerError: The tokenizer's files cannot be read, or are those of another model.
        ShardingError: The model cannot be spread over this mesh.
        ConfigError: An option is out of its bounds or given twice, the model does not fit the
            devices, the folder of compilation_cache cannot be written, or chat_template renders no
            conversation.
        KernelError: The devices cannot run a kernel that was asked for.
    """

    def __init__(
        self,
        model: Given,
        *,
        dtype: DTypeLike = "auto",
        weights: str = "auto",
        max_context: int | None = None,
        data: int = 1,
        expert: int = 1,
        tensor: int = 1,
        options: EngineOptions | None = None,
        mesh: MeshSpec | None = None,
        devices: Sequence[Any] | None = None,
        chat_template: str | Path | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        draft_model: Given | None = None,
        grammar_bounds: Bounds = DEFAULT_BOUNDS,
        compilation_cache: str | Path | None = "auto",
        progress: bool = True,
        on_load: Progress | None = None,
        on_compile: Progress | None = None,
        new_runner: NewRunner = DeviceRunner,
        digests: WeightDigests | None = None,
    ):
        spread = mesh_of(mesh, data, expert, tensor).build(devices or found_devices())
        options = options_of(options, max_context)
        check_draft_model(options, draft_model)
        self.digests = digests
        self._name = display_name(model)
        self._cache = cache_of_llm(compilation_cache)
        self._progress = progress
        self._on_compile = on_compile
        with self._bar("downloading", in_bytes=True) as bar:
            if draft_model:
                check_architecture(draft_model)  # before the larger model is fetched
            folder, tensors = model_of_llm(model, spread, dtype_name(dtype), weights, bar.update)
            draft_folder = model_folder(draft_model, bar.update) if draft_model else None
        files = open_model(folder, tensors)
        draft_files = open_draft(draft_folder, files) if draft_folder else None
        self._chat = Chat(
            folder,
            files.tokens.tokenizer,
            Path(chat_template).absolute() if chat_template else None,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        with ExitStack() as on_failure:
            on_failure.callback(self._chat.close)
            if chat_template and not files.spec.embeds:
                self._chat.check()
            with compiled_steps_kept(self._cache):
                with self._bar("loading", in_bytes=True) as bar:
                    told = on_load or bar.update
                    self.model = load(files, spread, dtype_name(dtype), told, weights, digests)
                    self.draft = _load_draft(draft_files, self.model, told)
                self.engine, self.runner = self._build_engine(options, new_runner)
            self.prompts = self._new_prompts(grammar_bounds)
            self._measured: tuple[Bucket, ...] = ()
            self._guard = CallGuard()
            self._streams = DeltaStreams(self.engine, self.model.tokenizer, self._guard)
            self._next_id = 0
            on_failure.pop_all()

    def _build_engine(
        self, options: EngineOptions, new_runner: NewRunner
    ) -> tuple[Engine, DeviceRunner]:
        """Build the engine and the runner of the loaded model, and of its draft model if any."""
        return build_engine(
            self.model.spec,
            self.model.params,
            self.model.mesh,
            options,
            self.model.fingerprint,
            new_runner,
            DraftModel(self.draft.spec, self.draft.params) if self.draft else None,
        )

    def _new_prompts(self, bounds: Bounds) -> Prompts:
        """Make what checks prompts of the loaded model, and compiles their grammars."""
        model = self.model
        config = self.runner.config
        vocab_size = model.spec.vocab_size
        self._grammars = Grammars(model.tokenizer, model.eos_ids, vocab_size, bounds)
        return Prompts(
            model.tokenizer,
            self._chat,
            model.eos_ids,
            vocab_size,
            config.max_context,
            partial(max_new_tokens, config),
            self._grammars,
            config.embeds,
        )

    # ---- the calls

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Generate for all prompts together and return when the last one is finished.

        Args:
            prompts: List of texts, lists of token ids, or conversations; or a single text.
            params: Sampling parameters for all prompts, or one per prompt; None is the default.
            **sampling: Single fields of SamplingParams, which override those of params.

        Returns:
            The completions in the order of the prompts, the n choices of a prompt in a row.
            Log-probabilities of the prompt come with choice 0. A choice that failed on the way has
            its `error` set.

        Raises:
            RequestError: A prompt or its parameters can never run. The error names the first such
                prompt as its field, and nothing runs.
            NotBuiltInError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed, or a step has failed.
        """
        named = named_prompts(prompts)
        with self._guard:
            self._check(embed=False)
            return self._complete(self._encode(named), params, sampling)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of conversations.

        The checkpoint's chat template makes a prompt of each, which is the completion's `prompt`.
        Names of special tokens inside of messages are plain text. To stream an answer, give
        `stream` a conversation.

        Args:
            messages: Conversation, a list of {"role": ..., "content": ...}, or a list of those.
            params: Sampling parameters for all conversations, or one per conversation.
            **sampling: Single fields of SamplingParams, which override those of params.

        Returns:
            The completions, in the order that `generate` returns them in.

        Raises:
            RequestError: A message is malformed, or a prompt can never run. The error's field is
                a path such as messages[2].role.
            ChatError: The chat template is missing, or refuses the messages.
            NotBuiltInError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed, or a step has failed.
        """
        named = named_conversations(messages)
        with self._guard:
            self._check(embed=False)
            rendered = {name: self._render(given, name) for name, given in named.items()}
            return self._complete(rendered, params, sampling)

    def embed(self, prompts: str | Iterable[str | Sequence[int]]) -> list[np.ndarray]:
        """Return the embedding of every prompt, from a model that embeds.

        A text gets the special tokens that the tokenizer's files put around it; token ids are taken
        as they are. Instructions, such as the prompts of config_sentence_transformers.json, are for
        the caller to write before the text.

        Args:
            prompts: List of texts or lists of token ids; or a single text.

        Returns:
            One float32 array of shape [D] and Euclidean length 1 per prompt, in their order.

        Raises:
            RequestError: A prompt is a conversation, has no tokens or is too long.
            NotBuiltInError: The model generates text and makes no embeddings.
            EngineError: The LLM is closed, or a step has failed.
        """
        named = named_prompts(prompts)
        with self._guard:
            self._check(embed=True)
            for name, prompt in named.items():
                if is_conversation(prompt):
                    raise RequestError(name, "is a conversation; give a text or its token ids")
            done = self._complete(self._encode(named), None, {})
        for completion in done:
            if completion.error:
                raise completion.error
        return [np.array(completion.embedding, np.float32) for completion in done]

    def _check(self, embed: bool) -> None:
        """Raise an error when the engine is closed, or the model does not do what is asked."""
        self.engine.check_usable()
        self.prompts.check_purpose(embed)

    def _encode(self, named: Mapping[str, Prompt]) -> dict[str, Rendered]:
        encoded = {}
        for name, prompt in named.items():
            self._guard.pass_on()
            encoded[name] = self.prompts.encode(prompt, name)
        return encoded

    def _render(self, conversation: Sequence[Message], name: str) -> Rendered:
        self._guard.pass_on()
        return self._chat.render(conversation, name)

    def _complete(
        self,
        prompts: Mapping[str, Rendered],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: SamplingFields,
    ) -> list[Completion]:
        """Check all prompts, run them together and return the completions in their order.

        `prompts` are by their names for errors.
        """
        each = params_of_each(params, sampling, len(prompts))
        prepared = list(map(self._checked, prompts.values(), each, prompts))
        choices = sum(p.request.params.n for p in prepared)
        with self._bar("embedding" if self.prompts.embeds else "generating") as bar:
            deltas = with_bar(self.run(prepared), choices, bar)
            done = {(d.prompt_index, d.index): d.completion for d in deltas if d.completion}
        return [done[key] for key in sorted(done)]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> Iterator[Delta]:
        """Generate for one prompt and yield the text as it grows.

        Leaving the iterator early aborts the request.

        Args:
            prompt: Text, token ids or conversation.
            params: Sampling parameters; None is the default.
            **sampling: Single fields of SamplingParams, which override those of params.

        Returns:
            Iterator of deltas. The last delta of each of the n choices carries its completion.

        Raises:
            RequestError: The prompt or its parameters can never run.
            NotBuiltInError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed, or a step has failed.
        """
        return self.run([self.prepare(prompt, params_of(params, sampling))])

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, name: str = ""
    ) -> Prepared:
        """Tokenize and check one prompt for `run`.

        Args:
            prompt: Text, token ids or conversation.
            params: Sampling parameters; None is the default.
            name: Field that errors about the prompt name; by default "prompt", or "messages" for a
                conversation.

        Returns:
            The prompt, ready to run.

        Raises:
            RequestError: The prompt or its parameters can never run.
            NotBuiltInError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed.
        """
        with self._guard:
            self._check(embed=False)
            name = name or ("messages" if is_conversation(prompt) else "prompt")
            return self._checked(self.prompts.encode(prompt, name), params_of(params, {}), name)

    def _checked(self, prompt: Rendered, params: SamplingParams, name: str) -> Prepared:
        """Compile the grammar, if any, and check the request under an id of its own."""
        self._guard.pass_on()
        self._next_id += 1
        params = self.prompts.constrain(prompt, params)
        grammar = self._grammars.compile(params.structure) if params.structure else None
        return self.prompts.check(prompt, params, name, id=str(self._next_id), grammar=grammar)

    def run(self, prompts: Sequence[Prepared]) -> Iterator[Delta]:
        """Run prepared prompts together and yield their text as it grows.

        Several iterators may be open at once: asking any of them for its next delta steps the one
        engine, and so advances them all. An abandoned iterator aborts what is left of its prompts.

        Args:
            prompts: Prompts from `prepare`; each may run once.

        Yields:
            Deltas of all choices of all prompts, in the order in which the engine makes them.

        Raises:
            EngineError: The LLM is closed, or a step has failed.
        """
        if prompts:
            with self._guard:
                self.warm_up([*self._streams.unfinished, *prompts])
            yield from self._streams.run(prompts)

    # ---- getting ready, and figures

    @property
    def chat_template(self) -> str:
        """Source of the template that conversations are rendered with.

        Raises:
            ChatError: The checkpoint has no chat template, or it cannot be read.
        """
        return self._chat.template.source

    @property
    def token_notes(self) -> tuple[str, ...]:
        """Lines on tokens that the checkpoint's files name but the model does not have."""
        return self.model.tokens.notes

    @property
    def chat_notes(self) -> tuple[str, ...]:
        """Lines on conversations that are refused, and on marks that are not read as tokens.

        A client can imitate such marks of the chat template.
        """
        return self._chat.notes

    def warm_up(self, prompts: Sequence[Prepared] | None = None) -> None:
        """Compile the steps that prompts need, as far as that has not happened yet.

        Args:
            prompts: Prompts whose steps are compiled; None is every step there is.

        Raises:
            EngineError: The LLM is closed, or a step has failed.
            MemoryLimitError: A step needs more memory than the devices have.
        """
        with self._guard:
            self._warm_up(prompts)

    def _warm_up(self, prompts: Sequence[Prepared] | None) -> None:
        self.engine.check_usable()
        plan = self.runner.buckets
        if not prompts:
            self._compile(plan.buckets if prompts is None else ())
            return
        sizes = [
            (len(p.request.prompt), max_new_tokens(self.runner.config, p.request))
            for p in prompts
            for _ in range(p.request.params.n)
        ]
        score = any(p.request.params.prompt_logprobs is not None for p in prompts)
        forced = any(p.request.grammar for p in prompts)
        buckets = plan.reachable(sizes, config=self.runner.config, score=score, forced=forced)
        self._compile(buckets)

    def _compile(self, buckets: Iterable[Bucket]) -> None:
        """Compile these steps unless they are compiled, and measure what is new."""
        buckets = tuple(buckets)
        if not self.runner.executables.has(buckets):
            with compiled_steps_kept(self._cache), self._bar("compiling") as bar:
                self.runner.warm_up(buckets, self._told(self._on_compile or bar.update))
        self.measure_steps()

    def _told(self, progress: Progress) -> Progress:
        """Return a function that tells of the progress, and lets a Ctrl-C take effect."""

        def told(done: int, total: int, what: str) -> None:
            self._guard.pass_on()
            progress(done, total, what)

        return told

    def _bar(self, title: str, in_bytes: bool = False) -> Bar:
        return Bar(Console(stderr=True, highlight=False), title, self._progress, in_bytes)

    def measure_steps(self) -> None:
        """Measure the compiled steps, where tokens are drafted, and give the engine the costs.

        The engine drafts only as many tokens as pay off by these times. Nothing is measured
        unless steps were compiled since the last call.
        """
        with self._guard:
            compiled = self.runner.compiled
            if self.engine.speculates and compiled != self._measured:
                config = self.runner.config
                costs = measure(self.runner, compiled, config.lanes, no_row=config.max_batch)
                self.engine.set_step_costs(costs)
                self._measured = compiled

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Write a timeline of what runs in a block to a file, for ui.perfetto.dev.

        Steps with their times, the chunks of every row, prefix hits, preemptions, and curves of
        rows, waiting sequences and pages. A step adds a few hundred bytes for each of its rows.
        Blocks may lie inside of each other, but not overlap in other ways.

        Args:
            path: File to write when the block ends, as it should or by an exception.

        Raises:
            ConfigError: The file cannot be written.
        """
        path = Path(path).absolute()
        with self._guard:
            write_trace(path, "")  # errors come before the work
            trace = StepTrace(self.engine)
        with trace:
            try:
                yield
            finally:
                with self._guard:
                    write_trace(path, trace.to_json())

    @property
    def padding_share(self) -> float:
        """Share of padding among all computed tokens so far, 0.0 to 1.0."""
        total = self.runner.total
        return 1 - total.live_tokens / total.computed_tokens if total.computed_tokens else 0.0

    def __repr__(self) -> str:
        model = self.model
        devices = "x".join(map(str, model.mesh.devices.shape))
        return (
            f"<LLM {self._name}: {model.spec.family}, {model.parameters / 1e6:,.1f} M parameters, "
            f"{model.params['embed'].dtype}, context {self.runner.config.max_context}, "
            f"{devices} {model.mesh.devices.flat[0].platform}>"
        )

    def close(self) -> None:
        """Free parameters, pages and rows.

        Open iterators end with EngineError. Nothing happens if the LLM is closed already, or in a
        fork of the process that made it.
        """
        if self._guard.in_fork:
            return
        with self._guard:
            self._chat.close()
            self._grammars.close()
            self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
