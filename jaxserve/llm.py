"""LLM: the offline door. A model, an engine, prompts and conversations in, completions out."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.chat import Chat, Message, Rendered
from jaxserve.completion import Completion, Delta
from jaxserve.config import EngineOptions
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.build import NewRunner, build_engine
from jaxserve.engine.device.draft_model import DraftModel
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import TokenEvent
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.engine.step_costs import measure
from jaxserve.errors import EngineError, RequestError
from jaxserve.loading.draft import check_choice, load_draft
from jaxserve.loading.folder import load
from jaxserve.open_choices import OpenChoices
from jaxserve.prompts import Prepared, Prompt, Prompts, is_conversation
from jaxserve.request import SamplingParams
from jaxserve.structure.grammars import DEFAULT_BOUNDS, Bounds, Grammars
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class _Live:
    """A request that runs: events go to the inbox of whoever waits for them."""

    prompt: Prepared
    inbox: deque[TokenEvent]


def _silent(done: int, total: int, what: str) -> None:
    pass


def _names(prompts: Sequence[Prompt]) -> list[str]:
    """Of the prompts, for errors."""
    if isinstance(prompts, str):
        raise RequestError("prompts", "is a string; give a list of prompts")
    return [f"prompts[{i}]" for i in range(len(prompts))]


class LLM:
    """A checkpoint ready to generate, or to embed. Close it, or use it in a `with`, to free its
    device memory.

    model: a folder as Hugging Face publishes it, or of checkpoints.convert. dtype: auto, float32,
    bfloat16. weights: auto (as stored), or quantized as models/quant.py has it: int8, fp8, int4,
    int4-g32 and so on. options: the engine's knobs. mesh: how many devices to spread over. devices:
    of which it takes the first; None: all that there are. chat_template: a file to use instead of
    the folder's chat template. tool_parser, reasoning_parser: how a server reads the answers to
    conversations (see choose_forms); text stays whole here. draft_model: a folder of a smaller
    model with the same tokens, for options that speculate with it. grammar_bounds: of structured
    output. on_load, on_compile: called with (done, total, what) as it gets ready. new_runner: makes
    what drives the devices. Errors: CheckpointError, TokenizerError, ShardingError, ConfigError,
    KernelError; later RequestError for what a client can mend, EngineError once the LLM is closed
    or a step has failed. One line each. Steps are compiled when the first prompts that need them
    come, before any of them runs. Not thread-safe; installs no signal handlers; sets no environment
    variable and no jax.config.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        weights: str = "auto",
        options: EngineOptions | None = None,
        mesh: MeshSpec | None = None,
        devices: Sequence[Any] | None = None,
        chat_template: str | Path | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        draft_model: str | Path | None = None,
        grammar_bounds: Bounds = DEFAULT_BOUNDS,
        on_load: Progress = _silent,
        on_compile: Progress = _silent,
        new_runner: NewRunner = DeviceRunner,
    ):
        spread = (mesh or MeshSpec()).build(devices or jax.devices())
        options = options or EngineOptions()
        check_choice(options, draft_model)
        self.model = load(Path(model), spread, dtype, on_load, weights)
        self.draft = load_draft(Path(draft_model), self.model, on_load) if draft_model else None
        self.engine: Engine
        self.runner: DeviceRunner
        self.engine, self.runner = build_engine(
            self.model.spec,
            self.model.params,
            spread,
            options,
            self.model.fingerprint,
            new_runner,
            DraftModel(self.draft.spec, self.draft.params) if self.draft else None,
        )
        self._chat = Chat(
            Path(model),
            self.model.tokenizer,
            Path(chat_template) if chat_template else None,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        vocab_size, eos_ids = self.model.spec.vocab_size, self.model.eos_ids
        self._grammars = Grammars(self.model.tokenizer, eos_ids, vocab_size, grammar_bounds)
        self.prompts = Prompts(
            self.model.tokenizer,
            self._chat,
            eos_ids,
            vocab_size,
            self.runner.config.max_context,
            partial(max_new_tokens, self.runner.config),
            self._grammars,
            self.runner.config.embeds,
        )
        self._on_compile = on_compile
        self._measured: tuple[Bucket, ...] = ()
        self._live: dict[str, _Live] = {}
        self._next_id = 0

    # ---- the calls

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """All completions: in the order of the prompts, a prompt's n choices one after the other.

        params: one for all, or one per prompt. Log-probabilities of the prompt come with choice 0.
        RequestError names the first prompt that cannot run; nothing runs then.
        """
        self._check(embed=False)
        names = _names(prompts)
        return self._complete(list(map(self.prompts.encode, prompts, names)), params, names)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """generate() for a conversation, or for a list of conversations.

        A conversation is a list of {"role": ..., "content": ...}; the checkpoint's chat template
        makes a prompt of it, which is the completion's `prompt`. Names of special tokens in the
        messages are text. RequestError names what is wrong by its path, such as messages[2].role;
        ChatError is what the template has to say. To stream an answer, give stream() a
        conversation.
        """
        self._check(embed=False)
        many = (
            isinstance(messages, Sequence)
            and messages
            and all(isinstance(m, list | tuple) for m in messages)
        )
        named = (
            {f"messages[{i}]": m for i, m in enumerate(messages)}
            if many
            else {"messages": messages}
        )
        return self._complete(
            [self._chat.render(m, name) for name, m in named.items()], params, list(named)
        )

    def embed(self, prompts: Sequence[str | Sequence[int]]) -> list[np.ndarray]:
        """The embedding of every prompt, float32 [D] of length 1, from a model that embeds.

        A text gets the tokens that the tokenizer's files put around it; token ids are taken as they
        are. Instructions, such as the prompts of config_sentence_transformers.json, are for the
        caller to write before the text. RequestError names the first prompt that cannot run;
        NotBuiltInError where the model generates, and where it embeds, from the calls that
        generate.
        """
        self._check(embed=True)
        names = _names(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            if is_conversation(prompt):
                raise RequestError(name, "is a conversation; give a text or its token ids")
        done = self._complete(list(map(self.prompts.encode, prompts, names)), None, names)
        for completion in done:
            if completion.error:
                raise completion.error
        return [np.array(completion.embedding, np.float32) for completion in done]

    def _check(self, embed: bool) -> None:
        self.engine.check_usable()
        self.prompts.check_purpose(embed)

    def _complete(
        self,
        prompts: list[Rendered],
        params: SamplingParams | Sequence[SamplingParams] | None,
        names: list[str],
    ) -> list[Completion]:
        each = (
            [params] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else params
        )
        if len(each) != len(prompts):
            raise RequestError(
                "params",
                f"{len(each)} for {len(prompts)} prompts; give one for all, or one per prompt",
            )
        prepared = list(map(self._checked, prompts, each, names))
        done = {(d.prompt_index, d.index): d.completion for d in self.run(prepared) if d.completion}
        return [done[key] for key in sorted(done)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The same for one prompt, piece by piece. Leaving the iterator early aborts the
        request."""
        return self.run([self.prepare(prompt, params)])

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, name: str = ""
    ) -> Prepared:
        """Tokenize and check one prompt; RequestError, with `name` as the field, when it could
        never run.
        """
        self._check(embed=False)
        name = name or ("messages" if is_conversation(prompt) else "prompt")
        return self._checked(self.prompts.encode(prompt, name), params, name)

    def _checked(self, prompt: Rendered, params: SamplingParams | None, name: str) -> Prepared:
        self._next_id += 1
        params = self.prompts.constrain(prompt, params or SamplingParams())
        grammar = self._grammars.compile(params.structure) if params.structure else None
        return self.prompts.check(prompt, params, name, id=str(self._next_id), grammar=grammar)

    def run(self, prompts: Sequence[Prepared]) -> Iterator[Delta]:
        """Run checked prompts together and yield their news as it comes; an abandoned iterator
        aborts what is left.

        Several iterators may be open at once; whichever is asked for its next piece moves all of
        them on.
        """
        if not prompts:
            return
        self.warm_up([*(live.prompt for live in self._live.values()), *prompts])
        choices: dict[str, OpenChoices] = {}  # by request id
        places: dict[str, int] = {}
        inbox: deque[TokenEvent] = deque()
        try:
            for place, p in enumerate(prompts):
                seed = self.engine.submit(p.request)
                self._live[p.request.id] = _Live(p, inbox)
                places[p.request.id] = place
                choices[p.request.id] = OpenChoices(p, seed, self.model.tokenizer, self.engine.stop)
            while choices:
                while not inbox:
                    self._pump()
                event = inbox.popleft()
                unfinished = choices.get(event.request_id)
                if unfinished is None or event.index not in unfinished:
                    continue  # its stop string came before this token
                piece, completion = unfinished.take(event)
                if not unfinished:
                    del choices[event.request_id], self._live[event.request_id]
                yield Delta(
                    places[event.request_id],
                    event.index,
                    piece.text,
                    tuple(piece.token_ids),
                    completion,
                )
        finally:
            self._abandon(choices)

    def _pump(self) -> None:
        """One step of the engine; everybody gets their events."""
        self.engine.check_usable()
        if not self.engine.has_work:
            raise EngineError("the engine is idle while a request waits for its end")
        for event in self.engine.step():
            if event.request_id in self._live:
                self._live[event.request_id].inbox.append(event)

    def _abandon(self, request_ids: Iterable[str]) -> None:
        """Abort what nobody waits for any more."""
        for request_id in request_ids:
            self._live.pop(request_id, None)
            self.engine.abort(request_id)
        while not self._live and self.engine.has_work:
            # nobody else is running: see the aborted ones out, so that their pages are back
            self._pump()

    # ---- getting ready, and figures

    @property
    def chat_template(self) -> str:
        """The source of the template that conversations are rendered with; ChatError when there is
        none.
        """
        return self._chat.template.source

    def warm_up(self, prompts: Sequence[Prepared] | None = None) -> None:
        """Compile what these prompts can reach (None: everything), as far as that has not happened
        yet.
        """
        self.engine.check_usable()
        plan = self.runner.buckets
        if not prompts:
            self.runner.warm_up(plan.buckets if prompts is None else (), self._on_compile)
            self.measure_steps()
            return
        sizes = [
            (len(p.request.prompt), max_new_tokens(self.runner.config, p.request))
            for p in prompts
            for _ in range(p.request.params.n)
        ]
        score = any(p.request.params.prompt_logprobs is not None for p in prompts)
        forced = any(p.request.grammar for p in prompts)
        buckets = plan.reachable(sizes, config=self.runner.config, score=score, forced=forced)
        self.runner.warm_up(buckets, self._on_compile)
        self.measure_steps()

    def measure_steps(self) -> None:
        """Where tokens are drafted: how long steps take that were compiled since the last time, so
        that drafts pay.
        """
        speculation, compiled = self.engine.scheduler.speculation, self.runner.compiled
        if speculation and compiled != self._measured:
            config = self.runner.config
            speculation.costs = measure(
                self.runner, compiled, config.lanes, no_row=config.max_batch
            )
            self._measured = compiled

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that nobody asked for, over all launches so far."""
        total = self.runner.total
        return 1 - total.live_tokens / total.computed_tokens if total.computed_tokens else 0.0

    def close(self) -> None:
        """Free parameters, pages and rows; a second time does nothing. Streams that are open end
        with EngineError.
        """
        self._chat.close()
        self._grammars.close()
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
