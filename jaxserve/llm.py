"""LLM, the Python API: a checkpoint that is loaded, compiled when needed, and closed."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxserve.backends import devices as found_devices
from jaxserve.call_guard import CallGuard
from jaxserve.chat import Chat
from jaxserve.checkpoints.hub.names import Given, display_name
from jaxserve.compilation_cache import KeptSteps, cache_of_llm
from jaxserve.config import EngineOptions, check_draft_model
from jaxserve.delta_streams import DeltaStreams
from jaxserve.engine.build import NewRunner, build_engine
from jaxserve.engine.device.draft_model import DraftModel
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.engine.trace import written_trace
from jaxserve.llm_arguments import OTHER_KEYWORDS, dtype_name, mesh_of, options_of
from jaxserve.llm_calls import LLMCalls
from jaxserve.llm_folder import open_llm
from jaxserve.llm_warm_up import WarmUp
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.folder import Model, ModelFiles, load
from jaxserve.loading.product import require_use
from jaxserve.names_elsewhere import LLM_ATTRIBUTES, explains_names
from jaxserve.progress import stderr_bar
from jaxserve.prompts import Prepared, Prompts
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.structure.grammars import DEFAULT_BOUNDS, Bounds, Grammars


@explains_names(OTHER_KEYWORDS, LLM_ATTRIBUTES)
class LLM(LLMCalls):
    """A checkpoint on this machine's devices, ready to generate text or to embed.

    Close it, or use it as a context manager, to free its device memory. A call waits until the
    fewest steps are compiled that its prompts can run with; smaller steps, which waste less, are
    compiled while it runs. Which step computes a token changes its logits within 1e-4 in float32:
    for the same values each time use `warm_up` first, or a deterministic engine. On a GPU that has
    not compiled every step of the model, and on several hosts, a call waits for all steps that it
    can reach.

    Threads may share an LLM: each call, and each step of `stream` and `run`, waits for those of
    other threads. Forks may not.
    A Ctrl-C takes effect between two steps: the call raises KeyboardInterrupt, its requests are
    aborted, and the next call is answered as if nothing had happened. For this a call on the main
    thread replaces the handler of SIGINT until it ends. A second Ctrl-C, five seconds after one
    that had no effect, ends a step that hangs, and the engine with it.

    No environment variable is set. While it loads and compiles, jax.config names the folder of its
    compiled steps, unless the program, or JAX_COMPILATION_CACHE_DIR, names one already; afterwards
    jax.config is as it was before. A compile that runs when a call ends goes on to its end.

    Args:
        model: Folder of a checkpoint as Hugging Face publishes it, or as jaxserve convert writes
            it; or, where there is no such folder, org/name[@revision] of a model on the hub, which
            is fetched into the hub's cache.
        dtype: Type to compute in: "auto" (as the checkpoint says), "float32" or "bfloat16", or
            jax's own object of it.
        weights: Type to hold the weights in: "auto" (as stored), or a quantization such as "int8".
        product: How a CPU multiplies by the weights: "auto", "xla", or its own kernel for few
            tokens with the instructions "avx512" or "avx2". Results differ by rounding.
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
        steps: Compiler of the runner's steps, which tells the engine of them and of their costs.
        prompts: Tokenizer, chat template and limits, by which requests are made of prompts.

    Raises:
        CheckpointError: The files of the checkpoint are damaged or incomplete, or the hub does not
            have the model.
        TokenizerError: The tokenizer's files cannot be read, or are those of another model.
        ShardingError: The model cannot be spread over this mesh.
        ConfigError: An option is out of its bounds or given twice, the model does not fit the
            devices, or chat_template renders no conversation.
        KernelError: The devices cannot run a kernel that was asked for.
    """

    def __init__(
        self,
        model: Given,
        *,
        dtype: DTypeLike = "auto",
        weights: str = "auto",
        product: str = "auto",
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
        kept = KeptSteps(cache_of_llm(compilation_cache))
        dtype = dtype_name(dtype)
        self._bar = partial(stderr_bar, progress)
        with self._bar("downloading", in_bytes=True) as bar:
            files, draft_files = open_llm(model, draft_model, spread, dtype, weights, bar.update)
        self._chat = Chat(
            files.folder,
            files.tokens.tokenizer,
            Path(chat_template).absolute() if chat_template else None,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        with ExitStack() as on_failure:
            on_failure.callback(self._chat.close)
            if chat_template and not files.spec.embeds:
                self._chat.check()
            with kept.used():
                with self._bar("loading", in_bytes=True) as bar:
                    told = on_load or bar.update
                    self.model = load(files, spread, dtype, told, weights, digests, product)
                    require_use(product, self.model.product)
                    self.draft = self._load_draft(draft_files, told, product)
                self.engine, self.runner = self._build_engine(options, new_runner)
            self.prompts = self._new_prompts(grammar_bounds)
            self._guard = CallGuard()
            bar_of_steps = partial(self._bar, "compiling")
            self.steps = WarmUp(
                *([model for model in (self.model, self.draft) if model], self.engine, self.runner),
                *(self._guard, kept, bar_of_steps, on_compile),
            )
            self._streams = DeltaStreams(self.engine, self.model.tokenizer, self._guard, self.steps)
            self._numbers = itertools.count(1)
            on_failure.pop_all()

    def _load_draft(self, files: ModelFiles | None, told: Progress, product: str) -> Model | None:
        """Load the draft model in the model's dtype; what is stored quantized stays so."""
        mesh = self.model.mesh
        return load(files, mesh, self.model.dtype, told, product=product) if files else None

    def _build_engine(
        self, options: EngineOptions, new_runner: NewRunner
    ) -> tuple[Engine, DeviceRunner]:
        """Build the engine and the runner of the loaded model, and of its draft model if any."""
        model = self.model
        draft = DraftModel(self.draft.spec, self.draft.params) if self.draft else None
        return build_engine(
            model.spec, model.params, model.mesh, options, model.fingerprint, new_runner, draft
        )

    def _new_prompts(self, bounds: Bounds) -> Prompts:
        """Make what checks prompts of the loaded model, and compiles their grammars."""
        model = self.model
        config = self.runner.config
        vocab_size = model.spec.vocab_size
        return Prompts(
            model.tokenizer,
            self._chat,
            model.eos_ids,
            vocab_size,
            config.max_context,
            partial(max_new_tokens, config),
            Grammars(model.tokenizer, model.eos_ids, vocab_size, bounds),
            config.embeds,
        )

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
        self.steps.compile_for(prompts)

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
        with written_trace(self.engine, Path(path).absolute(), self._guard):
            yield

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
            self.prompts.grammars.close()
            self.steps.rest()
            self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
