"""Loading of models as the flags of serve say, with progress on the console."""

from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.checkpoints.hub.names import display_name
from jaxserve.cli.flags import draft_model_of
from jaxserve.cluster.agreement import READS_ALL, agree_on_engine, digests_to_compare
from jaxserve.cluster.bootstrap import Pod
from jaxserve.cluster.compatibility import facts_of_start
from jaxserve.compilation_cache import read_compiled
from jaxserve.config.option import flag_of
from jaxserve.errors import ModelError
from jaxserve.flag_errors import flag_error
from jaxserve.llm import LLM
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.sampling_defaults import SamplingDefaults, sampling_defaults
from jaxserve.models.precision import XLA
from jaxserve.plan.bundle import Manifest, check_engine, open_bundle
from jaxserve.plan.bundle_folder import CACHE
from jaxserve.progress import Bar
from jaxserve.server.disaggregation.local_mesh import Place
from jaxserve.server.flags import ServeOptions
from jaxserve.server.model_steps import ModelSteps
from jaxserve.sharding.mesh import MeshSpec, device_kind


def use_bundle(folder: Path, options: ServeOptions) -> Manifest:
    """Open a bundle and take compiled steps from it.

    Raises ConfigError when the bundle is damaged, made by another version, or compiled for
    something else than the other options ask for.
    """
    manifest = open_bundle(folder)
    check_bundle(options, manifest)
    read_compiled(folder / CACHE)
    return manifest


def check_bundle(options: ServeOptions, manifest: Manifest) -> None:
    """Raise ConfigError for an option that contradicts what the bundle was compiled for."""
    check_role(options.roles.role, manifest)
    engine = options.engine
    asked: dict[str, Any] = {**engine.axes, **engine.given}
    asked |= {"dtype": engine.dtype, "weights": engine.weights, "product": engine.product}
    asked |= {"compilation_cache": engine.compilation_cache}
    decided = {"compilation_cache": "its own cache"} | asdict(manifest.options())
    decided |= dict(manifest.mesh) | {"prefer": "nothing of it"}
    decided |= {"dtype": manifest.dtype, "weights": manifest.weights, "product": XLA}
    unsaid = dict.fromkeys(("dtype", "weights", "product", "kv"), "auto") | dict.fromkeys(
        manifest.mesh, 1
    )
    for name, value in decided.items():
        given = asked.get(name)
        if given is not None and given != unsaid.get(name) and given != value:
            raise flag_error(
                flag_of(name), given, f"the bundle was compiled for {value} (leave it out)"
            )


def check_role(role: str, manifest: Manifest) -> None:
    """Raise ConfigError unless the bundle was compiled for the role.

    Servers that exchange pages with others have steps for that, which other servers lack.
    """
    exchanges = manifest.options().page_exchange
    if exchanges != (role != "both"):
        others = "both (jaxserve plan --link compiles for the others)"
        if exchanges:
            others = "prefill or decode"
        raise flag_error("--role", role, f"the bundle was compiled for --role {others}")


class ModelLoader:
    """Opens models and compiles their steps. Its methods block; call them on a thread of their own.

    Args:
        console: Console for progress bars and what is worth saying.
        manifest: Manifest of a bundle.
        resources: Stack that closes the models in the end.
    """

    def __init__(
        self,
        options: ServeOptions,
        console: Console,
        pod: Pod,
        manifest: Manifest | None,
        resources: ExitStack,
    ):
        self.console = console
        self._options = options
        self._pod = pod
        self._manifest = manifest
        self._resources = resources
        self._opened: list[LLM] = []
        self._earlier: WeightDigests | None = None  # of the model that was opened last

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self._options.served_model_name or display_name(self._options.model)

    @property
    def draft_model(self) -> str:
        """The folder of the draft model, as it was given."""
        return str(self._options.engine.draft_model)

    def sampling_defaults(self, llm: LLM) -> SamplingDefaults:
        """Return what requests leave open, as --generation-config says; ModelError if wrong."""
        if self._options.generation_config == "none" or llm.model.spec.embeds:
            return SamplingDefaults({})
        return sampling_defaults(llm.model.generation_config)

    def say(self, text: str) -> None:
        """Print a line without wrapping it."""
        self.console.print(text, soft_wrap=True, markup=False)

    def open(self, place: Place | None = None) -> LLM:
        """Load the model; `place` is its part of the devices where another model has the rest."""
        asked = self._options
        manifest = self._manifest
        exchanges_pages = asked.roles.role != "both" or place is not None
        options = replace(asked.engine.options, page_exchange=exchanges_pages)
        dtype = asked.engine.dtype
        weights = asked.engine.weights
        product = asked.engine.product
        mesh = place.mesh if place else MeshSpec(**asked.engine.axes)
        only_prefills = place is not None and place.prefills
        takes_requests = self._pod.leads and not only_prefills
        if only_prefills:  # without decode steps no token is ever drafted
            options = replace(options, speculate="off", draft_tokens=None)
        if manifest:
            options = manifest.options()
            dtype = manifest.dtype
            weights = manifest.weights
            product = XLA  # which the steps of a bundle are compiled for
            mesh = manifest.axes
        self._pod.agree("start", partial(facts_of_start, mesh, dtype, weights, options))
        digests = digests_to_compare(self._pod, asked.model)
        if digests and digests.all_hosts:
            self.say(READS_ALL)
        if exchanges_pages and digests is None:  # with an engine that must have the same weights
            digests = WeightDigests()
        draft = draft_model_of(asked.engine, asked.hosts)
        named = place.named() if place else nullcontext()
        with Bar(self.console, "loading", in_bytes=True) as bar, named:
            llm = LLM(
                asked.model,
                dtype=dtype,
                weights=weights,
                product=product,
                options=options,
                mesh=mesh,
                devices=place.devices if place else None,
                chat_template=asked.chat_template if takes_requests else None,
                tool_parser=asked.answers.tool_parser,
                reasoning_parser=asked.answers.reasoning_parser,
                unknown_fields=asked.answers.unknown_fields,
                draft_model=None if only_prefills else draft,
                grammar_bounds=asked.limits.grammars,
                on_load=bar.update,
                new_runner=self._pod.new_runner,
                compilation_cache=None,  # the command has chosen one
                digests=digests,
            )
        self._resources.enter_context(llm)
        self._opened.append(llm)
        if takes_requests and not llm.model.spec.embeds:
            llm.prompts.chat.check()
        self._check(llm)
        self._check_unchanged(llm)
        return llm

    def _check(self, llm: LLM) -> None:
        """Check that the bundle and the other hosts have the same engine."""
        model = llm.model
        config = llm.runner.config
        if self._manifest:
            kind = device_kind(model.mesh)
            check_engine(self._manifest, model.spec, model.dtype, kind, config, model.weights)
        agree_on_engine(self._pod, llm.model, config, llm.digests)

    def _check_unchanged(self, llm: LLM) -> None:
        """Check that the files of the model are those that were read for an earlier mesh."""
        earlier = self._earlier
        self._earlier = llm.digests
        if earlier is None or llm.digests is None:
            return
        if tensor := llm.digests.first_difference(earlier.text()):
            raise ModelError(
                f"{self._options.model}: {tensor} has changed since the prefill mesh read it "
                f"(start again when nobody writes to the model any more)"
            )

    def steps_of(self, llm: LLM) -> ModelSteps:
        """Return what compiles the steps of a model's engine."""
        bundled = self._manifest is not None
        ready_when = self._options.operation.ready_when
        return ModelSteps(llm, ready_when, bundled, self.console)

    @property
    def compiling(self) -> bool:
        """Return whether a step is being compiled, which nothing can interrupt."""
        return any(llm.runner.executables.background.busy for llm in self._opened)
