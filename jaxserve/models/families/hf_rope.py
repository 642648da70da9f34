"""From the fields of config.json that describe rotary embedding to a Rope."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.rope import LinearRope, Llama3Rope, LongRope, Rope, YarnRope

Take = Callable[..., Any]  # take(name): the field, KeyError without it; take(name, default)


def rope_of(fields: dict[str, Any], max_positions: int) -> Rope:
    """The rope that these fields name, all of which have to be understood. ModelError says which is
    not.
    """
    left = dict(fields)
    take = left.pop
    kind = take("rope_type", None) or take("type", None) or "default"
    take("type", None)
    if not isinstance(kind, str) or kind not in ROPES:
        raise ModelError(
            f"config.json: rope type {kind!r} is not implemented (implemented: {', '.join(ROPES)})"
        )
    try:
        theta, rotated = float(take("rope_theta")), float(take("partial_rotary_factor", 1.0))
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
    """Frequencies change only beyond max_position_embeddings, where this runtime's context ends:
    unscaled within.
    """
    take("original_max_position_embeddings", None)
    LinearRope(theta, factor=float(take("factor")))  # a checkpoint that is wrong there is wrong
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
    short, long = (tuple(map(float, take(name))) for name in ("short_factor", "long_factor"))
    if len(short) != len(long) or not all(factor > 0 for factor in short + long):
        raise ModelError(
            f"rope: {len(short)} short and {len(long)} long factors; as many of each, all positive"
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
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first Phi-3 checkpoints
}
