"""Cases that bench offline measures, and the rows, context and cache that they need.

Importing this module imports no jax, so that flags are checked before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.bench.checks import check_above, numbers
from jaxserve.bench.flags import OfflineOptions
from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.plan.model_config import read_config


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    test: str  # name of the case
    batch: int
    prompt: int  # tokens of each sequence
    output: int  # tokens of each sequence
    counted: int  # those of prompt and output that the rate counts

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.output


def cases_of(options: OfflineOptions) -> list[Case]:
    """Return the cases that the options ask for."""
    prompts = [n for n in numbers("prompt_tokens", options.prompt_tokens, int, -1) if n]
    outputs = [n for n in numbers("output_tokens", options.output_tokens, int, -1) if n]
    if not (prompts or outputs):
        raise ConfigError(
            "--prompt-tokens and --output-tokens are both 0, so nothing is left to measure"
        )
    cases: list[Case] = []
    for batch in numbers("batch", options.batch, int, 0):
        cases += [Case(f"pp{n}", batch, n, 1, n) for n in prompts]
        cases += [Case(f"tg{n}", batch, 1, n, n) for n in outputs]
        cases += [Case(f"pp{n}+tg{m}", batch, n, m, n + m) for n in prompts for m in outputs]
    return cases


def check_offline(options: OfflineOptions) -> None:
    """Raise ConfigError for flags that no model could be measured with."""
    check_above(options, 0, "repetitions")
    check_above(options, -1, "seed")
    cases = cases_of(options)
    given = options.engine.options
    rows = _most_rows(options, cases)
    if given.max_batch is not None and given.max_batch < rows:
        raise ConfigError(
            f"--batch asks for {rows} sequences a lane, more than --max-batch {given.max_batch} "
            f"(raise it)"
        )
    if given.max_context is not None:
        _check_context(cases, given.max_context)


def engine_of(options: OfflineOptions, cases: Sequence[Case]) -> EngineOptions:
    """Return an engine's options with the rows and the context that the cases need.

    Raises ConfigError if the model has a shorter context.
    """
    from jaxserve.loading.spec import read_spec  # late: it imports jax

    _check_context(cases, read_spec(read_config(str(options.model))[1])[1].max_positions)
    given = options.engine.options
    return replace(
        given,
        max_batch=given.max_batch or _most_rows(options, cases),
        max_context=given.max_context or _longest(cases).context,
    )


def _check_context(cases: Sequence[Case], context: int) -> None:
    longest = _longest(cases)
    if longest.context > context:
        raise ConfigError(
            f"{longest.test} takes {longest.context} tokens, more than the context of {context} "
            f"(--prompt-tokens, --output-tokens, --max-context)"
        )


def _longest(cases: Sequence[Case]) -> Case:
    return max(cases, key=lambda case: case.context)


def _most_rows(options: OfflineOptions, cases: Sequence[Case]) -> int:
    """Return the rows of the largest case in one lane."""
    lanes = options.engine.data * options.engine.expert
    return max(_rows(case, lanes) for case in cases)


def _rows(case: Case, lanes: int) -> int:
    """Return the rows of a case in one lane."""
    return -(-case.batch // lanes)


def check_room(case: Case, config: EngineConfig) -> None:
    """Raise ConfigError if the cache cannot hold all sequences of a case at a time.

    Some would wait, and the measurement would be of a smaller batch.
    """
    rows = _rows(case, config.lanes)
    if rows > config.held_rows(case.context):
        pages = min(pool.pages for pool in config.page_pools)
        raise flag_error(
            "--batch",
            case.batch,
            f"in {case.test} {rows} sequences of {case.context} tokens do not fit a cache of "
            f"{pages * config.page_size} tokens a lane (--cache-tokens, or a smaller batch)",
        )
