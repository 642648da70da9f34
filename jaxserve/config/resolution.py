"""From options, which may be left open, to a configuration, in which everything is decided."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from jaxserve.config.engine_config import EngineConfig, Pool, StateSize
from jaxserve.config.option import UNBOUNDED, flag_of
from jaxserve.config.options import (
    ATTENTION_KERNELS,
    DRAFT_TOKENS,
    EIGHT_BITS,
    KERNELS,
    PAGE_DTYPES,
    PAGE_SIZE,
    PAGE_SIZE_8_BITS,
    PRESETS,
    PROPOSERS,
    EngineOptions,
    Preset,
    given_or,
)
from jaxserve.config.snapshots import (
    check_snapshots_for_others,
    given_share,
    slots_of_rows,
    with_snapshots,
)
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error


def resolve(
    options: EngineOptions,
    *,
    max_positions: int,
    lanes: int,
    affordable_tokens: int,
    windows: Sequence[int | None] = (None,),
    states: Sequence[StateSize] = (),
    min_rows: int = 1,
    embeds: bool = False,
    weights: str = "float32",
    context_note: str = "",
) -> EngineConfig:
    """Return the configuration that follows from options, the model and the memory.

    Args:
        options: What was asked for.
        max_positions: Longest context of the model, in tokens.
        lanes: Number of lanes.
        affordable_tokens: KV tokens per lane that the memory has room for.
        windows: Window of each page group in tokens; None is full attention.
        states: Sizes for each group behind those, whose layers keep states of sequences in slots
            instead of pages.
        min_rows: Fewest rows of a step.
        embeds: Whether the model makes embeddings.
        weights: Dtype of the weights.
        context_note: What ends the context at max_positions, as of ModelSpec.

    Raises:
        ConfigError: A choice contradicts the model, the memory or another choice.
    """
    _check_context(options, max_positions, context_note)
    sizes = _sizes(options, max_positions, embeds, weights)
    taken_over = {field.name for field in fields(EngineOptions)} - sizes.keys()
    taken_over &= {field.name for field in fields(EngineConfig)}
    config = EngineConfig(
        lanes=lanes,
        min_rows=min_rows,
        embeds=embeds,
        pools=(),
        **{name: getattr(options, name) for name in taken_over},
        **sizes,
    )
    if config.drafts_by_model and None not in windows:
        problem = (
            "the draft model shares the page tables of layers without a window, and every layer of "
            "the model has one (choose ngram)"
        )
        raise flag_error("--speculate", "draft", problem)
    pages = _pages(options, config, affordable_tokens)
    _check_page_exchange(options, embeds)
    _check_deterministic(config)
    pools = [Pool(_pool_pages(config, pages, window), window) for window in windows]
    share = given_share(options, config)
    slots = slots_of_rows(options, config)
    pools += [with_snapshots(slots, config, pages // len(states), share, s) for s in states]
    config = replace(config, pools=tuple(pools))
    check_snapshots_for_others(config, share)
    return config


def check_options(options: EngineOptions) -> None:
    """Raise ConfigError for a choice with which no model could run.

    Sizes that depend on the model are checked as for one that takes any context, with room for its
    pages on one lane.
    """
    kernels = {
        "attention": ATTENTION_KERNELS,
        "grouped_matmul": KERNELS,
        "quantized_matmul": KERNELS,
        "recurrence": KERNELS,
    }
    for name, known in kernels.items():
        kernel = getattr(options, name)
        if kernel not in ("auto", *known):
            what = flag_of(name).removeprefix("--")
            choices = f"choose auto or one of {', '.join(known)}"
            raise ConfigError(f"{what} {kernel!r} is not built in; {choices} (--{what})")
    resolve(options, max_positions=options.max_context or 1, lanes=1, affordable_tokens=UNBOUNDED)


def _sizes(
    options: EngineOptions, max_positions: int, embeds: bool, weights: str
) -> dict[str, Any]:
    """Return the fields of an EngineConfig whose options may be left open, by name."""
    if options.prefer not in PRESETS:
        raise flag_error("--prefer", options.prefer, f"choose one of {', '.join(PRESETS)}")
    preset = PRESETS[options.prefer]
    max_context = given_or(options, "max_context", max_positions)
    kv = _kv(options.kv, weights)
    page_size = given_or(options, "page_size", PAGE_SIZE_8_BITS if kv in EIGHT_BITS else PAGE_SIZE)
    max_batch = given_or(options, "max_batch", preset.max_batch)
    # A preset's step may be smaller than a batch that was asked for, a step that was asked for not.
    step_tokens = given_or(options, "step_tokens", max(preset.step_tokens, max_batch))
    if step_tokens < max_batch:
        limit = f"--max-batch ({max_batch}), as every stream takes a token of each step"
        raise flag_error("--step-tokens", step_tokens, f"it must be at least {limit}")
    return {
        "max_context": max_context,
        "kv": kv,
        "page_size": page_size,
        "max_batch": max_batch,
        "step_tokens": step_tokens,
        "decode_steps": _decode_steps(options, preset, step_tokens, embeds),
        "draft_tokens": _draft_tokens(options, embeds),
    }


def _check_context(options: EngineOptions, max_positions: int, note: str) -> None:
    """Raise ConfigError for a longer context than the model has."""
    if options.max_context is None or options.max_context <= max_positions:
        return
    reason = note or (
        "max_position_embeddings of its config.json, or factor * original_max_position_embeddings "
        "of a rope_scaling of type yarn there, which publishers describe for longer contexts"
    )
    problem = f"the model takes at most {max_positions} tokens: {reason}"
    raise flag_error(flag_of("max_context"), options.max_context, problem)


def _kv(asked: str, weights: str) -> str:
    """Return the name in PAGE_DTYPES of what pages hold."""
    if asked not in ("auto", *PAGE_DTYPES):
        raise flag_error("--kv", asked, f"choose one of auto, {', '.join(PAGE_DTYPES)}")
    if asked == "float32" and weights != "float32":
        problem = f"keys and values of {weights} weights have no more digits than {weights} has"
        raise flag_error("--kv", asked, problem)
    return weights if asked == "auto" else asked


def _decode_steps(options: EngineOptions, preset: Preset, step_tokens: int, embeds: bool) -> int:
    """Return how many decode steps a launch may have."""
    several = (options.decode_steps or 1) > 1
    if several and embeds:
        problem = "a model that embeds decodes nothing (leave it out)"
        raise flag_error("--decode-steps", options.decode_steps, problem)
    if several and options.deterministic:
        problem = "--deterministic launches decode steps one by one (leave it out)"
        raise flag_error("--decode-steps", options.decode_steps, problem)
    if options.deterministic or embeds:
        default = 1
    else:
        default = min(preset.decode_steps, step_tokens)
    steps = given_or(options, "decode_steps", default)
    # Pages behind a window are kept for as many tokens in flight as one step may have.
    if steps > step_tokens:
        limit = f"--step-tokens ({step_tokens}; lower the one, or raise the other)"
        raise flag_error("--decode-steps", steps, f"it must be at most {limit}")
    return steps


def _draft_tokens(options: EngineOptions, embeds: bool) -> int:
    """Return the most tokens that are drafted for a row in a step; 0 where nothing is drafted."""
    if options.speculate not in PROPOSERS:
        raise flag_error("--speculate", options.speculate, f"choose one of {', '.join(PROPOSERS)}")
    if options.speculate == "off":
        if options.draft_tokens is not None:
            problem = "nothing is drafted (choose how with --speculate)"
            raise flag_error("--draft-tokens", options.draft_tokens, problem)
        return 0
    if embeds:
        problem = "a model that embeds generates nothing (leave it out)"
        raise flag_error("--speculate", options.speculate, problem)
    if options.deterministic:
        problem = "--deterministic runs one kind of decode step (leave one of them out)"
        raise flag_error("--speculate", options.speculate, problem)
    return given_or(options, "draft_tokens", DRAFT_TOKENS)


def _pages(options: EngineOptions, config: EngineConfig, affordable_tokens: int) -> int:
    """Return the pages of a pool without a window."""
    whole_batch = config.max_batch * config.pages_per_row * config.page_size
    tokens = given_or(options, "cache_tokens", min(affordable_tokens, whole_batch))
    if tokens < config.page_size:
        limit = f"a page of {config.page_size} tokens (raise it, or lower --page-size)"
        raise flag_error("--cache-tokens", tokens, f"it must be at least {limit}")
    return tokens // config.page_size


def _pool_pages(config: EngineConfig, pages: int, window: int | None) -> int:
    """Return the pages of a pool; a window never needs more than its rows can hold.

    The rows of a full batch, the same again for windows of cached prefixes, and the tokens of two
    steps: the one in flight, and the one planned after it.
    """
    if window is None:
        return pages
    tokens_of_row = max(config.decode_steps, 1 + config.draft_tokens)
    tokens_of_step = max(config.step_tokens, config.max_batch * tokens_of_row)
    # Each row may end within a page, in the window as well as in a step.
    of_steps = 2 * (config.page_span(tokens_of_step) + config.max_batch)
    of_windows = 2 * config.max_batch * (config.page_span(window) + 1)
    return min(pages, of_windows + of_steps)


def _check_page_exchange(options: EngineOptions, embeds: bool) -> None:
    """Refuse what exchanged pages cannot be combined with.

    Pages go from one prefix cache to another, and their last bits depend on the mesh that computed
    them.
    """
    if not options.page_exchange:
        return
    if embeds:
        raise ConfigError(
            "a model that embeds exchanges no pages with other engines, as it has no output to go "
            "on with"
        )
    if options.deterministic:
        problem = "pages of another engine have the bits of its mesh (leave it out)"
        raise flag_error("--deterministic", "given", problem)
    if not options.prefix_cache:
        problem = "pages of another engine are found in the prefix cache (leave it out)"
        raise flag_error("--no-prefix-cache", "given", problem)


def _check_deterministic(config: EngineConfig) -> None:
    if config.deterministic and config.step_tokens < config.page_size:
        problem = (
            f"--deterministic cuts prompts at page borders, so it must be at least a page of "
            f"{config.page_size} tokens (raise it, or lower --page-size)"
        )
        raise flag_error("--step-tokens", config.step_tokens, problem)
