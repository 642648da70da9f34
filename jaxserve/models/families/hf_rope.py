"""Reads the fields of config.json that describe rotary embedding."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.typed_fields import Fields, in_config, shown
from jaxserve.models.rope import LinearRope, Llama3Rope, LongRope, Rope, YarnRope

# Fields of M-RoPE (Qwen2-VL), whose sections of a head count the time, height and width of an image
# patch. Each counts the positions of text alike, so that text alone has the plain rope.
SECTIONS = ("mrope_section", "mrope_interleaved")
ORIGINAL = "original_max_position_embeddings"


def rope_of(given: dict[str, Any], max_positions: int) -> Rope:
    """Return the rope that these fields describe.

    Every field has to be understood; ModelError names those that are not, or are wrong.
    """
    named = [given[name] for name in ("rope_type", "type") if given.get(name) not in (None, "")]
    kind = named[0] if named else "default"
    if not isinstance(kind, str) or kind not in ROPES:
        raise ModelError(
            f"config.json: rope_type {shown(kind)} is not implemented (implemented: "
            f"{', '.join(ROPES)})"
        )
    fields = Fields(given, f"the rope of type {kind!r}", known=("rope_type", "type", *SECTIONS))
    theta = theta_of(fields, "rope_theta")
    rotated = fields.positive("partial_rotary_factor", 1.0)
    if rotated > 1:
        problem = f"partial_rotary_factor is {rotated:g}; it must be at most 1"
        raise ModelError(f"config.json: {problem}")
    try:
        rope = replace(ROPES[kind](theta, fields, max_positions), rotated=rotated)
    except ModelError as wrong:
        raise ModelError(in_config(str(wrong))) from None
    fields.finish()
    return rope


def theta_of(fields: Fields, name: str, default: float | None = None) -> float:
    """Return the base of frequencies; ModelError where there is none and no default."""
    theta = fields.positive(name, default)
    if theta <= 1:
        raise ModelError(f"config.json: {name} is {theta:g}; it must be more than 1")
    return theta


def _default(theta: float, fields: Fields, max_positions: int) -> Rope:
    fields.ignore(ORIGINAL)
    return Rope(theta)


def _dynamic(theta: float, fields: Fields, max_positions: int) -> Rope:
    """Return the unscaled rope.

    Dynamic scaling changes frequencies only beyond max_position_embeddings, where this runtime's
    context ends.
    """
    fields.ignore(ORIGINAL)
    fields.positive("factor")
    return Rope(theta)


def _linear(theta: float, fields: Fields, max_positions: int) -> Rope:
    fields.ignore(ORIGINAL)
    return LinearRope(theta, factor=fields.positive("factor"))


def _llama3(theta: float, fields: Fields, max_positions: int) -> Rope:
    return Llama3Rope(
        theta,
        factor=fields.positive("factor"),
        low_freq_factor=fields.positive("low_freq_factor"),
        high_freq_factor=fields.positive("high_freq_factor"),
        original_context=fields.integer(ORIGINAL),
    )


def _yarn(theta: float, fields: Fields, max_positions: int) -> Rope:
    return YarnRope(
        theta,
        factor=fields.positive("factor"),
        original_context=fields.integer_or(ORIGINAL, max_positions),
        beta_fast=_number_or_none(fields, "beta_fast") or 32.0,
        beta_slow=_number_or_none(fields, "beta_slow") or 1.0,
        truncate=fields.take("truncate", True, kind=bool),
        attention_scale=_positive_or_none(fields, "attention_factor"),
        mscale=_number_or_none(fields, "mscale"),
        mscale_all_dim=_number_or_none(fields, "mscale_all_dim"),
    )


def _longrope(theta: float, fields: Fields, max_positions: int) -> Rope:
    original = fields.integer(ORIGINAL)
    short = _factors(fields, "short_factor")
    long = _factors(fields, "long_factor")
    if len(short) != len(long):
        raise ModelError(
            f"config.json: short_factor has {len(short)} numbers and long_factor {len(long)}; "
            f"they have to be as many"
        )
    return LongRope(
        theta,
        short_factors=short,
        factor=fields.positive("factor", max_positions / original),
        original_context=original,
        attention_scale=_positive_or_none(fields, "attention_factor"),
    )


def _factors(fields: Fields, name: str) -> tuple[float, ...]:
    """Return a list of positive numbers, whose places are named in errors."""
    given = fields.take(name, kind=list)
    named = Fields({f"{name}[{i}]": factor for i, factor in enumerate(given)})
    return tuple(named.positive(f"{name}[{i}]") for i in range(len(given)))


def _positive_or_none(fields: Fields, name: str) -> float | None:
    return None if fields.nullable(name, None) is None else fields.positive(name)


def _number_or_none(fields: Fields, name: str) -> float | None:
    """Return a number of at least 0; 0 is published for a factor that is not in use."""
    if fields.nullable(name, None) is None:
        return None
    value = fields.number(name)
    if not 0 <= value < math.inf:
        raise ModelError(f"config.json: {name} is {value:g}; it must be 0 or a positive number")
    return value


ROPES: dict[str, Callable[[float, Fields, int], Rope]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # the name in the first Phi-3 checkpoints
}
