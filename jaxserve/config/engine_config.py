"""Configuration of an engine, with every choice made."""

from dataclasses import dataclass

from jaxserve.config.options import PAGE_DTYPES


@dataclass(frozen=True)
class Pool:
    """The pages of one page group in one lane.

    window: how many tokens a query of the group's layers sees; None: all tokens before it.
    """

    pages: int
    window: int | None = None

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Resolved configuration of an engine. Sizes are per lane.

    min_rows: the fewest rows that a step is compiled for. kv: what pages hold, a name of
    PAGE_DTYPES. pools: one per page group of the model. embeds: the model makes an embedding of
    every prompt, and generates nothing. draft_tokens: 0 where nothing is drafted. The other fields
    are those of EngineOptions.
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
        """True if there is a draft model, which has pages of its own."""
        return self.speculate == "draft"

    @property
    def full_group(self) -> int:
        """Index of the first page group without a window."""
        return next(group for group, pool in enumerate(self.pools) if pool.window is None)

    @property
    def page_dtype(self) -> str:
        """Dtype of the pages as numpy and ml_dtypes name it."""
        return PAGE_DTYPES[self.kv]

    @property
    def pages_per_row(self) -> int:
        """Width W of a page table: the pages of the longest sequence."""
        return self.page_span(self.max_context)

    def page_span(self, tokens: int) -> int:
        """Return the number of pages that positions 0 to `tokens` - 1 lie in."""
        return -(-tokens // self.page_size)

    def pages_held(self, pool: Pool, tokens: int) -> int:
        """Return the most pages of a pool that a sequence of `tokens` tokens holds at a time."""
        if pool.window is None:
            return self.page_span(tokens)
        return min(self.page_span(tokens), self._window_pages(pool.window))

    def _window_pages(self, window: int) -> int:
        # What the next query sees, the chunk in flight, and the chunk that is planned after it; one
        # page more, because windows do not begin at page borders.
        chunk = self.chunk_border if self.deterministic else self.step_tokens
        return self.page_span(window + 2 * chunk) + 1

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest sequence for which one lane has pages."""
        return min(map(self._longest, self.pools))

    def _longest(self, pool: Pool) -> int:
        if pool.window and pool.pages >= self._window_pages(pool.window):
            return self.max_context  # the window slides: pages behind it come back
        return pool.pages * self.page_size

    @property
    def chunk_border(self) -> int:
        """Multiple in tokens at which `deterministic` cuts prompts.

        Whole pages, and about a quarter of a step.
        """
        return max(self.page_size, self.step_tokens // 4 // self.page_size * self.page_size)
