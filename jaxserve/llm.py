"""LLM: the offline door. A model, an engine, prompts in, completions out."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.completion import Assembler, Completion, Delta
from jaxserve.config import EngineOptions
from jaxserve.engine.build import build_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import TokenEvent
from jaxserve.engine.runner import DeviceRunner, Progress
from jaxserve.errors import EngineError, RequestError
from jaxserve.load import load
from jaxserve.request import Request, SamplingParams
from sharding.mesh import MeshSpec

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Prepared:
    """A prompt that was checked: it can run."""

    request: Request
    text: str


def _silent(done: int, total: int, what: str) -> None:
    pass


class LLM:
    """A checkpoint ready to generate. Close it, or use it in a `with`, to free its device memory.

    model: a folder as Hugging Face publishes it. dtype: auto, float32, bfloat16. options: the engine's knobs.
    mesh: how many devices to spread over. on_load, on_compile: called with (done, total, what) as it gets ready.
    Errors: CheckpointError, TokenizerError, ShardingError, ConfigError, one line each. Steps are compiled when the
    first prompts that need them come, before any of them runs. Not thread-safe; installs no signal handlers; sets no
    environment variable and no jax.config.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        options: EngineOptions | None = None,
        mesh: MeshSpec | None = None,
        on_load: Progress = _silent,
        on_compile: Progress = _silent,
    ):
        devices = (mesh or MeshSpec()).build(jax.devices())
        self.model = load(Path(model), devices, dtype, on_load)
        self.engine: Engine
        self.runner: DeviceRunner
        self.engine, self.runner = build_engine(
            self.model.spec, self.model.params, devices, options or EngineOptions(), self.model.fingerprint
        )
        self._on_compile = on_compile
        self._inboxes: dict[str, deque[TokenEvent]] = {}
        self._next_id = 0

    # ---- the calls

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """All completions: in the order of the prompts, a prompt's n choices one after the other.

        params: one for all, or one per prompt. Log-probabilities of the prompt come with choice 0. RequestError names
        the first prompt that cannot run; nothing runs then.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts", "is a string; give a list of prompts")
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise RequestError("params", f"{len(each)} for {len(prompts)} prompts; give one for all, or one per prompt")
        prepared = [
            self.prepare(prompt, p, f"prompts[{i}]") for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
        ]
        done = {(d.prompt_index, d.index): d.completion for d in self.run(prepared) if d.completion}
        return [done[key] for key in sorted(done)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The same for one prompt, piece by piece. Leaving the iterator early aborts the request."""
        return self.run([self.prepare(prompt, params)])

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, name: str = "prompt") -> Prepared:
        """Tokenize and check one prompt; RequestError, with `name` as the field, when it could never run."""
        params = params or SamplingParams()
        ids = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError(name, "has no tokens, and this tokenizer adds none (give some text)")
        request = Request(id=f"{self._next_id}", prompt=tuple(ids), params=params, eos_ids=self.model.eos_ids)
        request.check(self.model.spec.vocab_size, name)
        text = prompt if isinstance(prompt, str) else self.model.tokenizer.decode(ids)
        self._next_id += 1
        self.engine.scheduler.max_tokens(request, name)
        return Prepared(request, text)

    def run(self, prompts: Sequence[Prepared]) -> Iterator[Delta]:
        """Run checked prompts together and yield their news as it comes; an abandoned iterator aborts what is left."""
        if not prompts:
            return
        self.warm_up(prompts)
        places = {p.request.id: i for i, p in enumerate(prompts)}
        choices: dict[tuple[str, int], Assembler] = {}
        inbox: deque[TokenEvent] = deque()
        try:
            for p in prompts:
                self._inboxes[p.request.id] = inbox
                seed = self.engine.submit(p.request)
                for index in range(p.request.params.n):
                    choices[p.request.id, index] = Assembler(p.request, p.text, index, seed, self.model.tokenizer)
            while choices:
                while not inbox:
                    self._pump()
                event = inbox.popleft()
                assembler = choices.get((event.request_id, event.index))
                if assembler is None:
                    continue  # its stop string came before this token
                delta = self._take(event, assembler, places[event.request_id])
                if delta.completion:
                    del choices[event.request_id, event.index]
                yield delta
        finally:
            self._abandon({request_id for request_id, _ in choices}, places)

    def _take(self, event: TokenEvent, assembler: Assembler, place: int) -> Delta:
        text = assembler.push(event)
        if assembler.stopped and not event.finish:
            event = self.engine.stop(event.request_id, event.index) or event
        completion = assembler.completion(event) if event.finish else None
        return Delta(place, event.index, text, tuple(event.tokens), completion)

    def _pump(self) -> None:
        """One step of the engine; events go to the inbox of whoever waits for them."""
        if not self.engine.has_work:
            raise EngineError("the engine is idle while a request waits for its end")
        for event in self.engine.step():
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox.append(event)

    def _abandon(self, unfinished: set[str], places: dict[str, int]) -> None:
        for request_id in places:
            del self._inboxes[request_id]
        for request_id in unfinished:
            self.engine.abort(request_id)
        while unfinished and not self._inboxes and self.engine.has_work:
            self._pump()  # nobody else is running: see the aborted ones out, so that their pages are back

    # ---- getting ready, and figures

    def warm_up(self, prompts: Sequence[Prepared] | None = None) -> None:
        """Compile what these prompts can reach (None: everything), as far as that has not happened yet."""
        plan = self.runner.buckets
        if not prompts:
            self.runner.warm_up(plan.buckets if prompts is None else (), self._on_compile)
            return
        sizes = [
            (len(p.request.prompt), self.engine.scheduler.max_tokens(p.request))
            for p in prompts
            for _ in range(p.request.params.n)
        ]
        score = any(p.request.params.prompt_logprobs is not None for p in prompts)
        self.runner.warm_up(plan.reachable(sizes, config=self.runner.config, score=score), self._on_compile)

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that nobody asked for, over all launches so far."""
        computed = sum(p.computed_tokens for p in self.runner.padding.values())
        live = sum(p.live_tokens for p in self.runner.padding.values())
        return 1 - live / computed if computed else 0.0

    def close(self) -> None:
        """Free parameters, pages and rows."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
