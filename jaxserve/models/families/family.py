"""What a family file provides, and the reading of config.json that refuses what nobody understood."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import ModelError
from jaxserve.models.rope import LinearRope, Llama3Rope, Rope, YarnRope
from jaxserve.models.spec import ModelSpec

# Fields of any config.json that change nothing in the forward pass of inference.
BOOKKEEPING: frozenset[str] = frozenset(
    "architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache initializer_range "
    "attention_dropout bos_token_id eos_token_id pad_token_id return_dict output_attentions output_hidden_states "
    "torchscript is_encoder_decoder is_decoder chunk_size_feed_forward id2label label2id problem_type "
    "_attn_implementation attn_implementation unsloth_version unsloth_fixed auto_map use_return_dict tf_legacy_loss "
    "use_bfloat16 tie_encoder_decoder finetuning_task task_specific_params tokenizer_class prefix".split()
)


class ConfigReader:
    """config.json of one checkpoint: every field is taken, listed as bookkeeping, or reported by `finish`."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = config
        self._seen: set[str] = set(BOOKKEEPING)

    def take(self, name: str, default: Any = None, *, kind: type | tuple[type, ...] = (int, float, bool)) -> Any:
        """The field's value; the default when it is absent or null; ModelError when it has another type."""
        self._seen.add(name)
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json lacks {name!r}, which this family needs")
        if not isinstance(value, kind):
            raise ModelError(f"config.json: {name} is {value!r}, not of the type it has in published checkpoints")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default, kind=int)
        if isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json: {name} is {value!r}; it must be an integer of at least 1")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Accept a field only with a value that this decoder implements (or absent)."""
        self._seen.add(name)
        value = self._config.get(name, allowed[0])
        if value not in allowed:
            raise ModelError(
                f"config.json: {name} = {value!r} is not implemented (implemented: {', '.join(map(repr, allowed))})"
            )

    def ignore(self, *names: str) -> None:
        self._seen.update(names)

    def finish(self) -> None:
        unknown = sorted(set(self._config) - self._seen)
        if unknown:
            raise ModelError(
                f"config.json has fields that this family does not understand: {', '.join(unknown)} "
                "(ignoring them could change the answers; add them to the family file once their meaning is known)"
            )

    def rope(self, default_theta: float) -> Rope:
        """From rope_parameters (newer), or rope_theta and rope_scaling (older)."""
        merged: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            self._seen.add(name)
            given = self._config.get(name) or {}
            if not isinstance(given, dict):
                raise ModelError(f"config.json: {name} is {given!r}; it must be an object or null")
            merged |= given
        if "rope_theta" not in merged:
            merged["rope_theta"] = self.take("rope_theta", default_theta)
        self.ignore("rope_theta")
        return _rope(merged, self.integer("max_position_embeddings"))


def _rope(fields: dict[str, Any], max_positions: int) -> Rope:
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    if not isinstance(kind, str) or kind not in _ROPES:
        raise ModelError(f"config.json: rope type {kind!r} is not implemented (implemented: {', '.join(_ROPES)})")
    take = fields.pop
    try:
        rope = _ROPES[kind](float(take("rope_theta")), take, max_positions)
    except ModelError as wrong:
        raise ModelError(f"config.json: {wrong}") from None
    except KeyError as missing:
        raise ModelError(f"config.json: rope type {kind!r} lacks {missing}") from None
    except (TypeError, ValueError) as wrong:
        raise ModelError(f"config.json: rope type {kind!r} has a field of the wrong type: {wrong}") from None
    if fields:
        raise ModelError(
            f"config.json: rope type {kind!r} has fields that are not understood: {', '.join(sorted(fields))}"
        )
    return rope


def _dynamic(theta: float, take: Callable, max_positions: int) -> Rope:
    """Frequencies change only beyond max_position_embeddings, where this runtime's context ends: unscaled within."""
    take("original_max_position_embeddings", None)
    LinearRope(theta, factor=float(take("factor")))  # a checkpoint that is wrong there is wrong
    return Rope(theta)


def _linear(theta: float, take: Callable, max_positions: int) -> Rope:
    take("original_max_position_embeddings", None)
    return LinearRope(theta, factor=float(take("factor")))


def _llama3(theta: float, take: Callable, max_positions: int) -> Rope:
    return Llama3Rope(
        theta,
        factor=float(take("factor")),
        low_freq_factor=float(take("low_freq_factor")),
        high_freq_factor=float(take("high_freq_factor")),
        original_context=int(take("original_max_position_embeddings")),
    )


def _yarn(theta: float, take: Callable, max_positions: int) -> Rope:
    def number(name: str) -> float | None:
        value = take(name, None)
        return None if value is None else float(value)

    original = take("original_max_position_embeddings", None) or max_positions
    return YarnRope(
        theta,
        factor=float(take("factor")),
        original_context=int(original),
        beta_fast=number("beta_fast") or 32.0,
        beta_slow=number("beta_slow") or 1.0,
        truncate=bool(take("truncate", True)),
        attention_scale=number("attention_factor"),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
    )


_ROPES: dict[str, Callable[[float, Callable, int], Rope]] = {
    "default": lambda theta, take, max_positions: Rope(theta),
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


@dataclass(frozen=True)
class Tensor:
    """One row of a weight-name table: a tensor of the checkpoint, and the view of it that a parameter is.

    path: where the parameter stands in the pytree. axes: the checkpoint's dimensions as letters, a dimension that
    flattens two written in parentheses, e.g. "(NH)D" for a q_proj weight.
    """

    name: str
    path: tuple[str | int, ...]
    axes: str

    def view(self, array: np.ndarray, sizes: Mapping[str, int], wanted: str) -> np.ndarray:
        """The checkpoint's array with the dimensions `wanted`: no copy. ModelError when its shape is another."""
        groups = list(_groups(self.axes))
        shape = tuple(int(np.prod([sizes[letter] for letter in group])) for group in groups)
        if array.shape != shape:
            raise ModelError(
                f"tensor {self.name} has shape {list(array.shape)}; config.json makes it {list(shape)} ({self.axes})"
            )
        letters = "".join(groups)
        split = array.reshape([sizes[letter] for letter in letters])
        return split.transpose([letters.index(letter) for letter in wanted])


def _groups(axes: str) -> Iterator[str]:
    """ "(NH)D" -> "NH", "D"."""
    while axes:
        if axes[0] == "(":
            group, axes = axes[1:].split(")", 1)
            yield group
        else:
            yield axes[0]
            axes = axes[1:]


@dataclass(frozen=True)
class Family:
    """A model family: how its config.json becomes a ModelSpec, and its weight-name table."""

    spec_from_hf: Callable[[Mapping[str, Any]], ModelSpec]
    tensors: Callable[[ModelSpec], list[Tensor]]
    ignored_tensors: tuple[str, ...] = ()  # suffixes of tensors that old checkpoints carry without need
