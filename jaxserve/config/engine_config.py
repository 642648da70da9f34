"""Configuration of an engine, with every choice made."""

from dataclasses import dataclass
from functools import cached_property

from jaxserve.config.kv_policy import FullPages, KVPolicy, SlidingPages, StateSlots
from jaxserve.config.options import PAGE_BYTES, PAGE_DTYPES


@dataclass(frozen=True)
class Pool:
    """The pages of one page group in one lane."""

    pages: int
    window: int | None = None  # tokens that a query of the layers sees; None: all before it

    def policy(self, page_size: int, in_flight: int) -> KVPolicy:
        """Return what the group keeps of a sequence.

        `in_flight` is the most tokens of a sequence that are planned and not committed yet.
        """
        if self.window is None:
            return FullPages(page_size)
        return SlidingPages(page_size, self.window, in_flight)


@dataclass(frozen=True)
class SlotPool(Pool):
    """The slots of a group whose layers keep states of sequences; `pages` counts slots.

    Fields without a comment are those of StateSlots.
    """

    interval: int = 0
    unit: int = 1
    keeps_last: bool = False

    def policy(self, page_size: int, in_flight: int) -> StateSlots:
        """Return what the group keeps of a sequence."""
        return StateSlots(page_size, self.interval, self.unit, self.keeps_last)


@dataclass(frozen=True)
class StateSize:
    """Sizes of one state, and of one token in the layers that keep pages."""

    slot_bytes: int  # states of one sequence, in all layers of a group of slots
    token_numbers: int  # numbers of one token's keys and values, in all layers

    def token_bytes(self, kv: str) -> int:
        """Return the bytes of one token in pages of this dtype, without scales."""
        return self.token_numbers * PAGE_BYTES[kv]

    def tokens(self, kv: str) -> int:
        """Return how many tokens' pages take as much memory as a slot."""
        return self.slot_bytes // self.token_bytes(kv)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Resolved configuration of an engine. Sizes are per lane.

    Fields without a comment are those of EngineOptions.
    """

    lanes: int
    min_rows: int  # fewest rows that a step is compiled for
    max_batch: int
    step_tokens: int
    decode_steps: int
    kv: str  # what pages hold, a name of PAGE_DTYPES
    page_size: int
    pools: tuple[Pool, ...]  # one per page group of the model, and one of slots behind them
    max_context: int
    prefix_cache: bool
    deterministic: bool
    attention: str
    grouped_matmul: str
    quantized_matmul: str
    recurrence: str
    embeds: bool = False  # True if the model embeds every prompt, and generates nothing
    speculate: str = "off"
    draft_tokens: int = 0  # 0 where nothing is drafted
    page_exchange: bool = False
    # As they were asked for; `pools` has what follows from them.
    snapshot_share: float | None = None
    snapshot_interval: int | None = None
    snapshot_answers: bool = True

    @property
    def drafts_by_model(self) -> bool:
        """True if there is a draft model, which has pages of its own."""
        return self.speculate == "draft"

    @property
    def full_group(self) -> int:
        """Index of the first group that keeps every page."""
        groups = enumerate(self.policies)
        return next(group for group, policy in groups if isinstance(policy, FullPages))

    @cached_property
    def policies(self) -> tuple[KVPolicy, ...]:
        """Policies of the page groups: what each keeps of a sequence."""
        # The chunk in flight, and the chunk that is planned after it.
        in_flight = 2 * (self.chunk_border if self.deterministic else self.step_tokens)
        return tuple(pool.policy(self.page_size, in_flight) for pool in self.pools)

    @cached_property
    def states(self) -> StateSlots | None:
        """Policy of the groups of slots, which all have the same; None without such groups."""
        return next((each for each in self.policies if isinstance(each, StateSlots)), None)

    @property
    def shares_prompts(self) -> bool:
        """True if choices of a request go on from the prompt of the first one."""
        has_snapshots = self.states is None or self.slots > self.max_batch
        return self.prefix_cache and has_snapshots

    @property
    def page_dtype(self) -> str:
        """Dtype of the pages as numpy and ml_dtypes name it."""
        return PAGE_DTYPES[self.kv]

    @property
    def page_pools(self) -> tuple[Pool, ...]:
        """Pools of the groups whose layers keep pages; those of slots come behind them."""
        return tuple(pool for pool in self.pools if not isinstance(pool, SlotPool))

    @property
    def slots(self) -> int:
        """Slots of a lane, each with one state of a sequence; 0 without layers that have states."""
        return sum(pool.pages for pool in self.pools if isinstance(pool, SlotPool))

    @property
    def pages_per_row(self) -> int:
        """Width W of a page table: the pages of the longest sequence."""
        return self.page_span(self.max_context)

    def page_span(self, tokens: int) -> int:
        """Return the number of pages that positions 0 to `tokens` - 1 lie in."""
        return -(-tokens // self.page_size)

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest sequence for which one lane has pages."""
        return min(
            policy.longest(pool.pages, self.max_context)
            for policy, pool in zip(self.policies, self.pools, strict=True)
        )

    def held_rows(self, tokens: int) -> int:
        """Return how many sequences of `tokens` tokens one lane has pages for."""
        return min(
            pool.pages // policy.held(tokens)
            for policy, pool in zip(self.policies, self.pools, strict=True)
        )

    @property
    def chunk_border(self) -> int:
        """Multiple in tokens at which `deterministic` cuts prompts.

        Whole pages, and about a quarter of a step.
        """
        return max(self.page_size, self.step_tokens // 4 // self.page_size * self.page_size)
