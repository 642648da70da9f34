"""Options and arguments that several programs have."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.hub.names import HubModel, model_of_flag
from jaxserve.cluster.hosts import HostOptions
from jaxserve.config import EngineOptions
from jaxserve.config.option import flag_of, given_options, option
from jaxserve.flag_errors import flag_error

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "bundled" / "tiny-chat"


def model_option() -> Path | HubModel:
    """Declare the option --model."""
    return option(
        BUNDLED,
        "checkpoint folder, Hugging Face's or Orbax, or org/name[@revision] of a model on the hub "
        "(default: the bundled model)",
        metavar="MODEL",
        parse=model_of_flag,
    )


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Options of the engine that a program loads; `given` are those of EngineOptions."""

    dtype: str = option(
        "auto",
        "dtype of activations and of weights that are not quantized: auto (as stored), float32 or "
        "bfloat16 (default: auto)",
    )
    weights: str = option(
        "auto",
        "format of the weights in memory: auto (as stored), int8, fp8, int4, or int4 in groups: "
        "int4-g32, int4-g64, int4-g128; w8a8-int8 and w8a8-fp8 quantize activations too, where the "
        "chip multiplies such numbers; a +head at the end quantizes the head as well (default: "
        "auto)",
        metavar="FORM",
    )
    product: str = option(
        "auto",
        "how a CPU multiplies by the weights: xla, or a kernel of its own for few tokens, with the "
        "instructions avx512 or avx2; auto takes the kernel where a mesh is one CPU and it was "
        "compiled when jaxserve was installed (default: auto)",
        metavar="NAME",
    )
    given: Mapping[str, Any] = given_options(EngineOptions)
    draft_model: Path | HubModel | None = option(
        None,
        "folder or name of a smaller model with the same tokens, for --speculate draft",
        metavar="MODEL",
        parse=model_of_flag,
    )
    data: int = option(
        1, "data axis of the mesh: devices that share the rows and their pages (default: 1)"
    )
    expert: int = option(
        1,
        "expert axis of the mesh: devices that share the experts, and the rows as with --data "
        "(default: 1)",
    )
    tensor: int = option(
        1,
        "tensor axis of the mesh: devices that share every layer's weights and KV heads; with "
        "fewer KV heads, several devices hold the same one (default: 1)",
    )
    compilation_cache: Path | None = option(
        None,
        "folder in which compiled steps are kept (default: that of JAX_COMPILATION_CACHE_DIR, or "
        "jaxserve/xla in the user's cache)",
        metavar="DIR",
    )

    @property
    def options(self) -> EngineOptions:
        """Options of the engine, with the defaults of those that are not given."""
        return EngineOptions(**self.given)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes by name, as MeshSpec takes them."""
        return {"data": self.data, "expert": self.expert, "tensor": self.tensor}


def draft_model_of(engine: EngineFlags, hosts: HostOptions) -> Path | HubModel | None:
    """Return the draft model; ConfigError on several hosts."""
    if engine.draft_model and (hosts.hosts or hosts.pod):
        raise flag_error(
            "--draft-model",
            engine.draft_model,
            "draft models are not built in for several hosts (--speculate ngram is)",
        )
    return engine.draft_model


def model_argument(
    parser: argparse.ArgumentParser,
    text: str = "folder or name of the model, which --model can give as well",
    *,
    kind: Callable[[str], object] = model_of_flag,
    default: Path | None = BUNDLED,
    then: str | None = None,
) -> None:
    """Add MODEL, an argument that sets what --model sets.

    Args:
        text: Help text.
        default: Default of --model, the same object.
        then: Name of the list of values that MODEL is put first in where --model is given; without
            it, giving both is an error.
    """
    parser.add_argument(
        "model",
        nargs="?",
        action=_ModelArgument,
        kind=kind,
        unset=default,
        then=then,
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=text,
    )


class _ModelArgument(argparse.Action):
    """Stores MODEL, unless --model has replaced the object `unset`.

    argparse would convert the default SUPPRESS too, so `kind`, the value's type, is not its `type`.
    """

    def __init__(
        self,
        *args: Any,
        kind: Callable[[str], object],
        unset: object,
        then: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._kind = kind
        self._unset = unset
        self._then = then

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest)
        if given is self._unset:
            setattr(namespace, self.dest, self._kind(str(values)))
        elif self._then:
            later = getattr(namespace, self._then) or []
            setattr(namespace, self._then, [values, *later])
        else:
            parser.error(f"{flag_of(self.dest)} is {given}, and {values} is another; give one")
