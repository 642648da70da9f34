"""Snapshots of recurrent states: how many slots they get, and how far apart they are."""

from dataclasses import replace

from jaxserve.config.engine_config import EngineConfig, SlotPool, StateSize
from jaxserve.config.option import bounds_of, check_bounds, flag_of
from jaxserve.config.options import SNAPSHOT_INTERVAL, SNAPSHOT_SHARE, EngineOptions, given_or
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error


def check_snapshots(options: EngineOptions, has_states: bool) -> None:
    """Raise ConfigError for an option of snapshots where no layer of a model has a state."""
    for name in ("snapshot_share", "snapshot_interval"):
        value = getattr(options, name)
        if value is not None and not has_states:
            problem = "no layer of the model has a recurrent state (leave it out)"
            raise flag_error(flag_of(name), value, problem)


def given_share(options: EngineOptions, config: EngineConfig) -> float:
    """Return the share of the cache's memory that snapshots take."""
    share = options.snapshot_share
    if share is None:
        return SNAPSHOT_SHARE if config.prefix_cache else 0.0
    check_bounds("snapshot_share", share, bounds_of(EngineOptions, "snapshot_share"))
    if not config.prefix_cache:
        problem = "snapshots are found by the prefix cache (leave out --no-prefix-cache)"
        raise flag_error("--snapshot-share", share, problem)
    return share


def slots_of_rows(options: EngineOptions, config: EngineConfig) -> SlotPool:
    """Return the slots of a group without those of snapshots: one for every row."""
    interval = _snapshot_interval(options, config)
    return SlotPool(
        config.max_batch,
        interval=interval if config.prefix_cache else 0,
        unit=_snapshot_unit(config),
        # The bits of a state depend on the steps that computed it: those of decodes are not shared.
        keeps_last=options.snapshot_answers and config.prefix_cache and not config.deterministic,
    )


def with_snapshots(
    slots: SlotPool, config: EngineConfig, pages: int, share: float, size: StateSize
) -> SlotPool:
    """Return the slots with those of snapshots, which take a share of the cache's memory.

    Args:
        pages: Pages of a pool without a window, as many for each group of slots.
    """
    of_pages = pages * config.page_size * size.token_bytes(config.kv)
    snapshots = int(of_pages * share / (1 - share)) // size.slot_bytes
    return replace(slots, pages=slots.pages + snapshots)


def check_snapshots_for_others(config: EngineConfig, share: float) -> None:
    """Refuse to exchange the pages of a model with states where no snapshot has room."""
    if config.page_exchange and config.states and config.slots <= config.max_batch:
        tokens = config.page_pools[0].pages * config.page_size
        raise ConfigError(
            "--role: other servers go on from a prompt's pages only with a snapshot behind them, "
            f"and a cache of {tokens:,} tokens with --snapshot-share {share:g} has room for none "
            "(raise --cache-tokens or --snapshot-share)"
        )


def _snapshot_interval(options: EngineOptions, config: EngineConfig) -> int:
    """Return the tokens between the snapshots of a long prompt."""
    unit = _snapshot_unit(config)
    interval = given_or(options, "snapshot_interval", max(SNAPSHOT_INTERVAL // unit, 1) * unit)
    if interval % unit:
        of = "chunks that --deterministic cuts" if config.deterministic else "pages"
        problem = f"it must be a multiple of {unit}, as of {of}"
        raise flag_error("--snapshot-interval", interval, problem)
    return interval


def _snapshot_unit(config: EngineConfig) -> int:
    """Return the tokens of which every snapshot ends at a multiple."""
    return config.chunk_border if config.deterministic else config.page_size
