"""Configuration of an engine: the operator's options, and the facts that they resolve to."""

from jaxserve.config.engine_config import EngineConfig, Pool, SlotPool, StateSize
from jaxserve.config.options import (
    EIGHT_BITS,
    PAGE_DTYPES,
    PRESETS,
    PROPOSERS,
    EngineOptions,
    Preset,
    check_draft_model,
)
from jaxserve.config.resolution import check_options, resolve
from jaxserve.config.snapshots import check_snapshots

__all__ = [
    "EIGHT_BITS",
    "PAGE_DTYPES",
    "PRESETS",
    "PROPOSERS",
    "EngineConfig",
    "EngineOptions",
    "Pool",
    "Preset",
    "SlotPool",
    "StateSize",
    "check_draft_model",
    "check_options",
    "check_snapshots",
    "resolve",
]
