"""The operator's choices: what may be left open (EngineOptions), and what the engine runs with
(EngineConfig).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ConfigError

MAX_DECODE_STEPS = 64
PROPOSERS = ("off", "ngram", "draft")
DRAFTED, MOST_DRAFTED = 7, 31  # tokens of a row in a step
PAGE_DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}  # by --kv
EIGHT_BITS = ("int8", "fp8")
Prefer = Literal["latency", "balanced", "throughput"]


@dataclass(frozen=True)
class Preset:
    """max_batch: rows. step_tokens: the most tokens one step computes: how long a prompt may hold
    up a stream.

    decode_steps: how many decode steps are launched as one while nobody else could run; tokens then
    arrive that many at a time.
    """

    max_batch: int
    step_tokens: int
    decode_steps: int


PRESETS: dict[str, Preset] = {
    "latency": Preset(max_batch=4, step_tokens=128, decode_steps=1),
    "balanced": Preset(max_batch=16, step_tokens=512, decode_steps=1),
    "throughput": Preset(max_batch=64, step_tokens=2048, decode_steps=8),
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Flags as the operator gave them; None is "choose for me".

    cache_tokens: capacity of the KV cache of one lane in tokens. max_context: the longest prompt
    plus output. decode_steps: see Preset. kv: what pages hold, a name of PAGE_DTYPES, or auto: the
    dtype of the weights. page_size: None: 64 tokens, and 128 in 8 bits: as many bytes as 64 in
    bfloat16, and the least of the TPU kernel. speculate: how tokens are drafted: off; ngram: what
    followed the newest tokens where they occurred before; or draft: by a smaller model.
    draft_tokens: of a row in a step, at most. deterministic: the same tokens bit for bit whatever
    the load, at the price of padding and of reserving pages. page_exchange: pages of prompts can be
    read for other engines, and theirs written.
    """

    prefer: Prefer = "balanced"
    max_batch: int | None = None
    step_tokens: int | None = None
    decode_steps: int | None = None
    kv: str = "auto"
    page_size: int | None = None
    cache_tokens: int | None = None
    max_context: int | None = None
    prefix_cache: bool = True
    speculate: str = "off"
    draft_tokens: int | None = None
    deterministic: bool = False
    page_exchange: bool = False
    attention: str = "auto"
    grouped_matmul: str = "auto"
    quantized_matmul: str = "auto"


@dataclass(frozen=True)
class Pool:
    """The pages of one page group in one lane. window: how many tokens a query sees of it; None:
    all before it.
    """

    pages: int
    window: int | None = None

    def first_seen(self, position: int) -> int:
        """The first position that the token at this one sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Resolved: every field is a fact. Sizes are per lane; one pool per page group of the model.

    min_rows: the fewest rows that a step is compiled for. kv: what pages hold, a name of
    PAGE_DTYPES. embeds: the model makes an embedding of every prompt, and generates nothing.
    draft_tokens: 0 where nothing is drafted.
    """

    lanes: int
    min_rows: int
    max_batch: int
    step_tokens: int
    decode_steps: int
    kv: str
    page_size: int
    pools: tuple[Pool, ...]
    max_context: int
    prefix_cache: bool
    deterministic: bool
    attention: str
    grouped_matmul: str
    quantized_matmul: str
    embeds: bool = False
    speculate: str = "off"
    draft_tokens: int = 0
    page_exchange: bool = False

    @property
    def drafts_by_model(self) -> bool:
        """Whether there is a draft model, with pages of its own."""
        return self.speculate == "draft"

    @property
    def full_group(self) -> int:
        """The first page group without a window."""
        return next(group for group, pool in enumerate(self.pools) if pool.window is None)

    @property
    def page_dtype(self) -> str:
        """What pages hold, as numpy and ml_dtypes call it."""
        return PAGE_DTYPES[self.kv]

    @property
    def pages_per_row(self) -> int:
        """W, the width of a page table."""
        return self.page_span(self.max_context)

    def page_span(self, tokens: int) -> int:
        """Pages that `tokens` positions need."""
        return -(-tokens // self.page_size)

    def pages_held(self, pool: Pool, tokens: int) -> int:
        """The most pages of a pool that a sequence of so many tokens holds at a time.

        Of a window: what its next query sees, its chunk in flight, and the chunk after.
        """
        return (
            self.page_span(tokens)
            if pool.window is None
            else min(self.page_span(tokens), self._sliding(pool.window))
        )

    def _sliding(self, window: int) -> int:
        chunk = self.chunk_border if self.deterministic else self.step_tokens
        return self.page_span(window + 2 * chunk) + 1

    @property
    def capacity(self) -> int:
        """The longest sequence, in tokens, for which one lane has pages."""
        limits = (
            self.max_context
            if pool.window and pool.pages >= self._sliding(pool.window)
            else pool.pages * self.page_size
            for pool in self.pools
        )
        return min(limits)

    @property
    def chunk_border(self) -> int:
        """Under `deterministic`, prompts are cut at multiples of this many tokens: pages, a quarter
        of a step.
        """
        return max(self.page_size, self.step_tokens // 4 // self.page_size * self.page_size)


def resolve(
    options: EngineOptions,
    *,
    max_positions: int,
    lanes: int,
    affordable_tokens: int,
    windows: Sequence[int | None] = (None,),
    min_rows: int = 1,
    embeds: bool = False,
    weights: str = "float32",
) -> EngineConfig:
    """Fill in what was left open. affordable_tokens: KV tokens per lane for which there is memory.

    windows: of each page group. A group with a window gets as many pages as its rows can hold, and
    as many again for the windows of cached prefixes, if that is less than --cache-tokens. embeds:
    see EngineConfig. weights: their dtype. ConfigError when a choice contradicts the model, the
    memory or another choice.
    """
    if options.prefer not in PRESETS:
        raise ConfigError(f"--prefer {options.prefer!r}: choose one of {', '.join(PRESETS)}")
    preset = PRESETS[options.prefer]
    context = _bounded("--max-context", options.max_context, 1, max_positions, max_positions)
    kv = _kv(options.kv, weights)
    page_size = _bounded("--page-size", options.page_size, 1, 1024, 128 if kv in EIGHT_BITS else 64)
    max_batch = _bounded("--max-batch", options.max_batch, 1, 4096, preset.max_batch)
    step_tokens = _bounded(
        "--step-tokens", options.step_tokens, 1, 2**17, max(preset.step_tokens, max_batch)
    )
    if step_tokens < max_batch:
        raise ConfigError(
            f"--step-tokens {step_tokens} is less than --max-batch {max_batch}: every stream "
            f"takes a token of each step"
        )
    decode_steps = _decode_steps(options, preset, step_tokens, embeds)
    draft_tokens = _draft_tokens(options, embeds)
    if options.speculate == "draft" and None not in windows:
        raise ConfigError(
            "--speculate draft: the draft model shares the page tables of layers without a "
            "window, and every layer of "
            "the model has one (choose ngram)"
        )
    useful = min(affordable_tokens, max_batch * _round_up(context, page_size))
    wanted = _bounded("--cache-tokens", options.cache_tokens, 1, 2**50, useful)
    num_pages = wanted // page_size
    if num_pages < 1:
        raise ConfigError(
            f"--cache-tokens {wanted} is less than one page of {page_size} tokens (raise it, or "
            f"lower --page-size)"
        )

    def sliding(window: int) -> int:
        in_steps = 2 * (
            -(-max(step_tokens, max_batch * max(decode_steps, 1 + draft_tokens)) // page_size)
            + max_batch
        )
        return 2 * max_batch * (-(-window // page_size) + 1) + in_steps

    _check_page_exchange(options, embeds)
    if options.deterministic and step_tokens < page_size:
        raise ConfigError(
            f"--deterministic cuts prompts at page borders: a step of {step_tokens} tokens is "
            f"less than "
            f"a page of {page_size} (raise --step-tokens, or lower --page-size)"
        )
    return EngineConfig(
        lanes=lanes,
        min_rows=min_rows,
        max_batch=max_batch,
        step_tokens=step_tokens,
        decode_steps=decode_steps,
        kv=kv,
        page_size=page_size,
        pools=tuple(
            Pool(min(num_pages, sliding(window)) if window else num_pages, window)
            for window in windows
        ),
        max_context=context,
        prefix_cache=options.prefix_cache,
        deterministic=options.deterministic,
        attention=options.attention,
        grouped_matmul=options.grouped_matmul,
        quantized_matmul=options.quantized_matmul,
        embeds=embeds,
        speculate=options.speculate,
        draft_tokens=draft_tokens,
        page_exchange=options.page_exchange,
    )


def _draft_tokens(options: EngineOptions, embeds: bool) -> int:
    if options.speculate not in PROPOSERS:
        raise ConfigError(
            f"--speculate {options.speculate!r}: choose one of {', '.join(PROPOSERS)}"
        )
    if options.speculate == "off":
        if options.draft_tokens is not None:
            raise ConfigError(
                f"--draft-tokens {options.draft_tokens}: nothing is drafted (--speculate)"
            )
        return 0
    if options.deterministic or embeds:
        why = (
            "a model that embeds generates nothing"
            if embeds
            else "--deterministic runs one kind of decode step"
        )
        raise ConfigError(f"--speculate {options.speculate}: {why} (leave one of them out)")
    return _bounded("--draft-tokens", options.draft_tokens, 1, MOST_DRAFTED, DRAFTED)


def _check_page_exchange(options: EngineOptions, embeds: bool) -> None:
    """Pages travel from prefix cache to prefix cache, and their last bits depend on who computed
    them.
    """
    if not options.page_exchange:
        return
    if embeds:
        raise ConfigError(
            "a model that embeds exchanges no pages with other engines: it has no output to go "
            "on with"
        )
    if options.deterministic:
        raise ConfigError(
            "--deterministic: pages of another engine have the bits of its mesh (leave it out)"
        )
    if not options.prefix_cache:
        raise ConfigError(
            "--no-prefix-cache: pages of another engine are found in the prefix cache (leave it "
            "out)"
        )


def _kv(asked: str, weights: str) -> str:
    if asked not in ("auto", *PAGE_DTYPES):
        raise ConfigError(f"--kv {asked!r}: choose one of auto, {', '.join(PAGE_DTYPES)}")
    if asked == "float32" != weights:
        raise ConfigError(
            f"--kv float32: keys and values of {weights} weights have no more digits than "
            f"{weights} has"
        )
    return weights if asked == "auto" else asked


def _decode_steps(options: EngineOptions, preset: Preset, step_tokens: int, embeds: bool) -> int:
    """One under `deterministic`: there, a decode step is one executable. One where there is
    none."""
    if embeds and (options.decode_steps or 1) > 1:
        raise ConfigError(
            f"--decode-steps {options.decode_steps}: a model that embeds decodes nothing (leave "
            f"it out)"
        )
    if options.deterministic and (options.decode_steps or 1) > 1:
        raise ConfigError(
            f"--decode-steps {options.decode_steps}: --deterministic launches decode steps one "
            f"by one (leave it out)"
        )
    default = 1 if options.deterministic or embeds else min(preset.decode_steps, step_tokens)
    steps = _bounded("--decode-steps", options.decode_steps, 1, MAX_DECODE_STEPS, default)
    if (
        steps > step_tokens
    ):  # pages behind a window are kept for as many tokens in flight as a step may have
        raise ConfigError(
            f"--decode-steps {steps} is more than --step-tokens {step_tokens} (lower it, or "
            f"raise that)"
        )
    return steps


def _bounded(flag: str, value: int | None, low: int, high: int, default: int) -> int:
    """The value, or the default where it was left open."""
    if value is None:
        return default
    if not low <= value <= high:
        raise ConfigError(f"{flag} {value}: it must be between {low} and {high}")
    return value


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
