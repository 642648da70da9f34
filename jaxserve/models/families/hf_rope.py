"""Reads the fields of config.json that describe rotary embedding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.rope import LinearRope, Llama3Rope, LongRope, Rope, YarnRope

# Fields of M-RoPE (Qwen2-VL), whose sections of a head count the time, height and width of an image
# patch. Each counts the positions of text alike, so that text alone has the plain rope.
SECTIONS = ("mrope_section", "mrope_interleaved")
# take(name) removes and returns a field, KeyError if it is absent; take(name, default) the default.
Take = Callable[..., Any]


def rope_of(fields: dict[str, Any], max_positions: int) -> Rope:
    """Return the rope that these fields describe.

    Every field has to be understood; ModelError names those that are not, or are wrong.
    """
    left = dict(fields)
    take = left.pop
    kind = take("rope_type", None) or take("type", None) or "default"
    take("type", None)  # some configs have both names
    for name in SECTIONS:
        take(name, None)
    if not isinstance(kind, str) or kind not in ROPES:
        raise ModelError(
            f"config.json: rope type {kind!r} is not implemented (implemented: {', '.join(ROPES)})"
        )
    try:
        theta = float(take("rope_theta"))
        rotated = float(take("partial_rotary_factor", 1.0))
        rope = replace(ROPES[kind](theta, take, max_positions), rotated=rotated)
    except ModelError as wrong:
        raise ModelError(f"config.json: {wrong}") from None
    except KeyError as missing:
        raise ModelError(f"config.json: rope type {kind!r} lacks {missing}") from None
    except (TypeError, ValueError, OverflowError) as wrong:
        raise ModelError(
            f"config.json: rope type {kind!r} has a field of the wrong type: {wrong}"
        ) from None
    if left:
        raise ModelError(
            f"config.json: rope type {kind!r} has fields that are not understood: "
            f"{', '.join(sorted(left))}"
        )
    return rope


def _default(theta: float, take: Take, max_positions: int) -> Rope:
    take("original_max_position_embeddings", None)
    return Rope(theta)


def _dynamic(theta: float, take: Take, max_positions: int) -> Rope:
    """Return the unscaled rope.

    Dynamic scaling changes frequencies only beyond max_position_embeddings, where this runtime's
    context ends.
    """
    take("original_max_position_embeddings", None)
    LinearRope(theta, factor=float(take("factor")))  # refuses a factor that makes no sense
    return Rope(theta)


def _linear(theta: float, take: Take, max_positions: int) -> Rope:
    take("original_max_position_embeddings", None)
    return LinearRope(theta, factor=float(take("factor")))


def _llama3(theta: float, take: Take, max_positions: int) -> Rope:
    return Llama3Rope(
        theta,
        factor=float(take("factor")),
        low_freq_factor=float(take("low_freq_factor")),
        high_freq_factor=float(take("high_freq_factor")),
        original_context=int(take("original_max_position_embeddings")),
    )


def _yarn(theta: float, take: Take, max_positions: int) -> Rope:
    return YarnRope(
        theta,
        factor=float(take("factor")),
        original_context=int(take("original_max_position_embeddings", None) or max_positions),
        beta_fast=_number(take, "beta_fast") or 32.0,
        beta_slow=_number(take, "beta_slow") or 1.0,
        truncate=bool(take("truncate", True)),
        attention_scale=_number(take, "attention_factor"),
        mscale=_number(take, "mscale"),
        mscale_all_dim=_number(take, "mscale_all_dim"),
    )


def _longrope(theta: float, take: Take, max_positions: int) -> Rope:
    original = int(take("original_max_position_embeddings"))
    short = tuple(map(float, take("short_factor")))
    long = tuple(map(float, take("long_factor")))
    if len(short) != len(long) or not all(factor > 0 for factor in short + long):
        raise ModelError(
            f"rope: {len(short)} short and {len(long)} long factors; their numbers must be equal "
            f"and all factors positive"
        )
    return LongRope(
        theta,
        short_factors=short,
        factor=_number(take, "factor") or max_positions / original,
        original_context=original,
        attention_scale=_number(take, "attention_factor"),
    )


def _number(take: Take, name: str) -> float | None:
    value = take(name, None)
    return None if value is None else float(value)


ROPES: dict[str, Callable[[float, Take, int], Rope]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # the name in the first Phi-3 checkpoints
}
