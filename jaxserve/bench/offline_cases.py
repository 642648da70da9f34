"""Cases that bench offline measures, and the rows, context and cache that they need."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.bench.checks import numbers
from jaxserve.bench.flags import OfflineOptions
from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.errors import ConfigError, flag_error
from jaxserve.loading.spec import read_spec
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


def engine_of(options: OfflineOptions, cases: Sequence[Case]) -> EngineOptions:
    """Return an engine's options with the rows and the context that the cases need.

    Raises ConfigError if `options` ask for fewer rows or a shorter context.
    """
    given = options.engine.options
    lanes = options.engine.data * options.engine.expert
    rows = max(_rows(case, lanes) for case in cases)
    longest = max(cases, key=lambda case: case.context)
    if given.max_batch is not None and given.max_batch < rows:
        raise ConfigError(
            f"--batch asks for {rows} sequences a lane, more than --max-batch {given.max_batch} "
            f"(raise it)"
        )
    context = read_spec(read_config(str(options.model))[1])[1].max_positions
    if given.max_context is not None:
        context = min(context, given.max_context)
    if longest.context > context:
        raise ConfigError(
            f"{longest.test} takes {longest.context} tokens, more than the context of {context} "
            f"(--prompt-tokens, --output-tokens, --max-context)"
        )
    return replace(
        given, max_batch=given.max_batch or rows, max_context=given.max_context or longest.context
    )


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
