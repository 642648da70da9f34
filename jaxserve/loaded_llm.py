"""A checkpoint that is loaded and ready to run: what LLM and AsyncLLM have in common."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.backends import devices as found_devices
from jaxserve.call_guard import CallGuard
from jaxserve.chat import Chat, UnknownFields
from jaxserve.checkpoints.hub.names import Given, display_name
from jaxserve.compilation_cache import KeptSteps, cache_of_llm
from jaxserve.completion import Completion
from jaxserve.config import EngineOptions, check_draft_model
from jaxserve.engine.build import NewRunner, build_engine
from jaxserve.engine.device.draft_model import DraftModel
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.llm_arguments import dtype_name, mesh_of, options_of
from jaxserve.llm_folder import open_llm
from jaxserve.llm_requests import RequestMaker, prompts_of
from jaxserve.llm_warm_up import WarmUp
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.folder import Model, ModelFiles, load
from jaxserve.loading.product import require_use
from jaxserve.progress import stderr_bar
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.structure.grammars import DEFAULT_BOUNDS, Bounds


class LoadedLLM:
    """A checkpoint on this machine's devices, with its engine.

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
        unknown_fields: UnknownFields = "error",
        draft_model: Given | None = None,
        grammar_bounds: Bounds = DEFAULT_BOUNDS,
        compilation_cache: str | Path | None = "auto",
        progress: bool = True,
        on_load: Progress | None = None,
        on_compile: Progress | None = None,
        new_runner: NewRunner = DeviceRunner,
        digests: WeightDigests | None = None,
    ):
        """Load a checkpoint and build its engine.

        Args:
            model: Folder of a checkpoint as Hugging Face publishes it, or as jaxserve convert
                writes it; or, where there is no such folder, org/name[@revision] of a model on the
                hub, which is fetched into the hub's cache.
            dtype: Type to compute in: "auto" (as the checkpoint says), "float32" or "bfloat16", or
                jax's own object of it.
            weights: Type to hold the weights in: "auto" (as stored), or a quantization such as
                "int8".
            product: How a CPU multiplies by the weights: "xla", its own kernel for few tokens with
                the instructions "avx512" or "avx2", or "auto", which takes the best and measures at
                the first load for how many tokens. Results differ by rounding.
            max_context: The longest prompt plus output, in tokens; None is the model's.
            data: Devices along the mesh axis that shares the rows and their pages.
            expert: Devices along the axis that shares the experts, and the rows as well.
            tensor: Devices along the axis that shares every layer's weights and KV heads.
            options: Sizes and features of the engine; None takes the defaults.
            mesh: MeshSpec instead of data, expert and tensor.
            devices: Devices of which the mesh takes the first ones; None is all that JAX sees.
            chat_template: File to use instead of the folder's chat template.
            tool_parser: Format of tool calls in answers, "auto" or one of TOOL_PARSERS. A server
                takes answers apart by it; completions of this class keep their text whole.
            reasoning_parser: Format of reasoning in answers, one of REASONING_PARSERS; as above.
            unknown_fields: Options of a conversation that its chat template does not heed: "error"
                refuses them, "ignore" lets them be.
            draft_model: Folder or name of a smaller model with the same vocabulary, for options
                that let it draft tokens.
            grammar_bounds: Limits on the size, compile time and cache of structured output.
            compilation_cache: Folder that keeps compiled steps for the next start, unless the
                program or JAX_COMPILATION_CACHE_DIR has chosen one for jax. "auto" is jaxserve/xla
                in the user's cache, the folder of the commands; None keeps nothing.
            progress: Show bars while a model is fetched, the checkpoint is loaded and steps are
                compiled, and while LLM's `generate`, `chat` or `embed` runs: on a terminal's
                standard error and in notebooks, nowhere else.
            on_load: Function called with (done, total, what) while the checkpoint is loaded,
                instead of a bar.
            on_compile: Function called so while steps are compiled, instead of a bar.
            new_runner: Factory of the object that drives the devices.
            digests: Digests of the model's weights to add up while they are read, for programs that
                compare the weights of several processes.

        Raises:
            CheckpointError: The files of the checkpoint are damaged or incomplete, or the hub does
                not have the model.
            TokenizerError: The tokenizer's files cannot be read, or are those of another model.
            ShardingError: The model cannot be spread over this mesh.
            ConfigError: An option is out of its bounds or given twice, the model does not fit the
                devices, or chat_template renders no conversation.
            KernelError: The devices cannot run a kernel that was asked for.
        """
        spread = mesh_of(mesh, data, expert, tensor).build(devices or found_devices())
        self._check_mesh(spread)
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
            unknown_fields=unknown_fields,
        )
        with ExitStack() as on_failure:
            on_failure.callback(self._chat.close)
            if chat_template and not files.spec.embeds:
                self._chat.check()
            with kept.used():
                with self._bar("loading", in_bytes=True) as bar:
                    told = on_load or bar.update
                    # Bits depend on what is measured, so those who compare them do not.
                    measures = not (options.deterministic or options.page_exchange)
                    self.model = load(
                        *(files, spread, dtype, told, weights, digests, product, measures)
                    )
                    require_use(product, self.model.product)
                    self.draft = self._load_draft(draft_files, told, product)
                self.engine, self.runner = self._build_engine(options, new_runner)
            self.prompts = prompts_of(self.model, self._chat, self.runner.config, grammar_bounds)
            self._guard = CallGuard()
            bar_of_steps = partial(self._bar, "compiling")
            self.steps = WarmUp(
                *([model for model in (self.model, self.draft) if model], self.engine, self.runner),
                *(self._guard, kept, bar_of_steps, on_compile),
            )
            self._requests = RequestMaker(self.prompts, self._guard, self._start_calls())
            on_failure.pop_all()

    def _check_mesh(self, mesh: Mesh) -> None:
        """Raise ConfigError for a mesh that the calls of this class cannot run on."""

    def _start_calls(self) -> Callable[[], None]:
        """Make what runs the calls of this class.

        Returns a function that raises EngineError if no call can run any more. It may not refer to
        this object, which has to be freed as soon as the program drops it.
        """
        raise NotImplementedError

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

    @property
    def padding_share(self) -> float:
        """Share of padding among all computed tokens so far, 0.0 to 1.0."""
        total = self.runner.total
        return 1 - total.live_tokens / total.computed_tokens if total.computed_tokens else 0.0

    def __repr__(self) -> str:
        model = self.model
        devices = "x".join(map(str, model.mesh.devices.shape))
        return (
            f"<{type(self).__name__} {self._name}: {model.spec.family}, "
            f"{model.parameters / 1e6:,.1f} M parameters, "
            f"{model.params['embed'].dtype}, context {self.runner.config.max_context}, "
            f"{devices} {model.mesh.devices.flat[0].platform}>"
        )

    def _free(self) -> None:
        """Free parameters, pages and rows, and end the processes of templates and grammars."""
        self._chat.close()
        self.prompts.grammars.close()
        self.steps.rest()
        self.engine.close()


def embeddings_of(completions: Sequence[Completion]) -> list[np.ndarray]:
    """Return the embeddings of finished requests; raises the error of the first that failed."""
    for completion in completions:
        if completion.error:
            raise completion.error
    return [np.array(completion.embedding, np.float32) for completion in completions]
