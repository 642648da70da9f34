"""Loading of models as the flags of serve say, with progress on the console."""

import argparse
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial

from rich.console import Console

from jaxserve.checkpoints.hub.names import display_name
from jaxserve.cli.flags import draft_model, engine_options
from jaxserve.cluster.agreement import READS_ALL, agree_on_engine, digests_to_compare
from jaxserve.cluster.bootstrap import Pod
from jaxserve.cluster.compatibility import facts_of_start
from jaxserve.compilation_cache import read_compiled
from jaxserve.config.option import flag_of
from jaxserve.errors import ConfigError, ModelError, flag_text
from jaxserve.llm import LLM
from jaxserve.loading.digests import WeightDigests
from jaxserve.loading.sampling_defaults import SamplingDefaults, sampling_defaults
from jaxserve.plan.bundle import CACHE, Manifest, check_engine, open_bundle
from jaxserve.progress import Bar
from jaxserve.server.disaggregation.local_mesh import Place
from jaxserve.server.flags import limits
from jaxserve.sharding.mesh import MeshSpec, device_kind


def use_bundle(args: argparse.Namespace) -> Manifest:
    """Open the bundle of --bundle and take compiled steps from it.

    Raises ConfigError when the bundle is damaged, made by another version, or compiled for
    something else than the other flags ask for.
    """
    manifest = open_bundle(args.bundle)
    check_bundle(args, manifest)
    read_compiled(args.bundle / CACHE)
    return manifest


def check_bundle(args: argparse.Namespace, manifest: Manifest) -> None:
    """Raise ConfigError for a flag that contradicts what the bundle was compiled for."""
    check_role(args, manifest)
    decided = asdict(manifest.options()) | dict(manifest.mesh) | {"prefer": "nothing of it"}
    decided |= {"dtype": manifest.dtype, "weights": manifest.weights}
    unsaid = dict.fromkeys(("dtype", "weights", "kv"), "auto") | dict.fromkeys(manifest.mesh, 1)
    for name, value in ({"compilation_cache": "its own cache"} | decided).items():
        asked = getattr(args, name, None)
        if asked is not None and asked != unsaid.get(name) and asked != value:
            raise ConfigError(
                flag_text(
                    flag_of(name), asked, f"the bundle was compiled for {value} (leave it out)"
                )
            )


def check_role(args: argparse.Namespace, manifest: Manifest) -> None:
    """Raise ConfigError unless the bundle was compiled for the role.

    Servers that exchange pages with others have steps for that, which other servers lack.
    """
    exchanges = manifest.options().page_exchange
    if exchanges != (args.role != "both"):
        others = (
            "prefill or decode"
            if exchanges
            else "both (jaxserve plan --link compiles for the others)"
        )
        raise ConfigError(
            flag_text("--role", args.role, f"the bundle was compiled for --role {others}")
        )


class ModelLoader:
    """Opens models and compiles their steps. Its methods block; call them on a thread of their own.

    console: gets progress bars and what is worth saying.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        console: Console,
        pod: Pod,
        manifest: Manifest | None,
        resources: ExitStack,
    ):
        """manifest: of a bundle. resources: closes the models in the end."""
        self.console = console
        self._args = args
        self._pod = pod
        self._manifest = manifest
        self._resources = resources
        self._earlier: WeightDigests | None = None  # of the model that was opened last

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self._args.served_model_name or display_name(self._args.model)

    @property
    def draft_model(self) -> str:
        """The folder of the draft model, as it was given."""
        return str(self._args.draft_model)

    def sampling_defaults(self, llm: LLM) -> SamplingDefaults:
        """Return what requests leave open, as --generation-config says; ModelError if wrong."""
        if self._args.generation_config == "none" or llm.model.spec.embeds:
            return SamplingDefaults({})
        return sampling_defaults(llm.model.generation_config)

    def say(self, text: str) -> None:
        """Print a line without wrapping it."""
        self.console.print(text, soft_wrap=True, markup=False)

    def open(self, place: Place | None = None) -> LLM:
        """Load the model; `place` is its part of the devices where another model has the rest."""
        args = self._args
        manifest = self._manifest
        exchanges_pages = args.role != "both" or place is not None
        options = replace(engine_options(args), page_exchange=exchanges_pages)
        dtype = args.dtype
        weights = args.weights
        mesh = MeshSpec(data=args.data, expert=args.expert, tensor=args.tensor)
        if place:
            mesh = place.mesh
        only_prefills = place is not None and place.prefills
        takes_requests = self._pod.leads and not only_prefills
        if only_prefills:  # without decode steps no token is ever drafted
            options = replace(options, speculate="off", draft_tokens=None)
        if manifest:
            options = manifest.options()
            dtype = manifest.dtype
            weights = manifest.weights
            mesh = manifest.axes
        self._pod.agree("start", partial(facts_of_start, mesh, dtype, weights, options))
        digests = digests_to_compare(self._pod, args.model)
        if digests and digests.all_hosts:
            self.say(READS_ALL)
        if exchanges_pages and digests is None:  # with an engine that must have the same weights
            digests = WeightDigests()
        named = place.named() if place else nullcontext()
        with Bar(self.console, "loading", in_bytes=True) as bar, named:
            llm = LLM(
                args.model,
                dtype=dtype,
                weights=weights,
                options=options,
                mesh=mesh,
                devices=place.devices if place else None,
                chat_template=args.chat_template if takes_requests else None,
                tool_parser=args.tool_parser,
                reasoning_parser=args.reasoning_parser,
                draft_model=None if only_prefills else draft_model(args),
                grammar_bounds=limits(args).grammars,
                on_load=bar.update,
                new_runner=self._pod.new_runner,
                compilation_cache=None,  # the command has chosen one
                digests=digests,
            )
        self._resources.enter_context(llm)
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
                f"{self._args.model}: {tensor} has changed since the prefill mesh read it (start "
                f"again when nobody writes to the model any more)"
            )

    def compile(self, llm: LLM) -> None:
        """Compile every step that the engine can launch, and say where they came from."""
        runner = llm.runner
        buckets = runner.buckets.buckets
        with Bar(self.console, "compiling") as bar:
            runner.warm_up(buckets, bar.update)
        llm.measure_steps()
        llm.prompts.grammars.warm_up()
        executables = runner.executables
        if self._manifest is None:
            self.console.print(
                f"{len(buckets)} steps compiled, {executables.found_compiled} compiles found in "
                "the cache"
            )
            return
        missed = executables.missed
        found = executables.programs - len(missed)
        self.say(f"{found} of {executables.programs} steps and writers of rows found in the bundle")
        for name in missed:
            self.say(f"not found in the bundle, so compiled here: {name}")
