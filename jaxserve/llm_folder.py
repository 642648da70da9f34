"""Files of an LLM's models, fetched from the hub only if the weights fit the devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.checkpoints.hub.names import Given, display_name, hub_model
from jaxserve.engine.device.lowering import abstract_params
from jaxserve.engine.device.memory import bytes_per_device, device_limit
from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.loading.draft import open_draft
from jaxserve.loading.folder import ModelFiles, open_model
from jaxserve.loading.load_plan import DTYPES, choose_scheme
from jaxserve.loading.model_folder import Report, described, model_folder, remote_model
from jaxserve.loading.spec import expected_dtype, stored_scheme
from jaxserve.models.families.weight_table import Stored
from jaxserve.models.quant import QuantScheme
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.mesh import spans_hosts


@dataclass(frozen=True)
class Room:
    """Memory of the devices of a mesh, and how it is asked to hold the weights of an LLM."""

    mesh: Mesh
    dtype: str
    weights: str
    draft: ModelSpec | None = None
    draft_scheme: QuantScheme | None = None

    def check(self, given: Given, config: Mapping[str, Any], spec: ModelSpec) -> None:
        """Raise MemoryLimitError if the weights of a model and its draft model alone do not fit.

        Args:
            given: Folder or name of the model.
            config: Its config.json.
        """
        kept = self._dtype(config)
        needed = sum(
            bytes_per_device(abstract_params(held, kept, self.mesh, scheme))
            for held, scheme in self._held(given, spec)
        )
        try:
            limit = device_limit(self.mesh)
        except ConfigError:  # a device that does not report its memory; --cache-tokens plans it
            return
        if needed <= limit:
            return
        whose = "its weights and those of the draft model" if self.draft else "its weights"
        less = "--weights"
        if self.dtype not in DTYPES and kept == DTYPES["float32"]:
            less = "--dtype bfloat16 or --weights"
        raise MemoryLimitError(
            f"{display_name(given)}: {whose} take {needed / 2**30:.2f} GiB of each device, which "
            f"has {limit / 2**30:.2f} GiB, so nothing is fetched (more devices with --tensor, or "
            f"fewer bytes with {less}; jaxserve plan MODEL --suggest finds what fits)",
            missing=needed - limit,
        )

    def _dtype(self, config: Mapping[str, Any]) -> jnp.dtype:
        """Return the dtype of weights that are not quantized; of auto as config.json says."""
        return jnp.dtype(DTYPES[self.dtype if self.dtype in DTYPES else expected_dtype(config)])

    def _held(
        self, given: Given, spec: ModelSpec
    ) -> Iterator[tuple[ModelSpec, QuantScheme | None]]:
        """Yield the model, and the draft model if there is one, as the devices hold them."""
        shards = self.mesh.shape["tensor"]
        yield spec.on(shards), choose_scheme(Path(str(given)), self.weights, _stored(given))
        if self.draft:
            yield self.draft.on(shards), self.draft_scheme


def open_llm(
    model: Given, draft_model: Given | None, mesh: Mesh, dtype: str, weights: str, report: Report
) -> tuple[ModelFiles, ModelFiles | None]:
    """Fetch and open the files of a model, and of its draft model if there is one.

    Arguments and errors are as in LLM; `report` is told of the bytes that are fetched.
    """
    room = Room(mesh, dtype, weights)
    if draft_model and (hub_model(model) or hub_model(draft_model)):
        # Before the larger model is fetched
        room = replace(room, draft=described(draft_model)[1], draft_scheme=_stored(draft_model))
        if not hub_model(model):  # whose files are there, so that nothing else would check
            # They may be narrower than its config.json says.
            least = room if room.dtype in DTYPES else replace(room, dtype="bfloat16")
            least.check(model, *described(model))
    folder, tensors = model_of_llm(model, room, report)
    draft_folder = model_folder(draft_model, report) if draft_model else None
    files = open_model(folder, tensors)
    return files, open_draft(draft_folder, files) if draft_folder else None


def model_of_llm(
    given: Given, room: Room, report: Report
) -> tuple[Path, Mapping[str, Stored] | None]:
    """Return the folder of a model, and its weights where they are read from the hub.

    The path is absolute: templates are read later, when the program may work in another folder.
    A model of the hub is fetched; where the mesh spans several hosts, each reads its part of the
    weights only. Raises MemoryLimitError, before anything large is fetched, if the weights alone do
    not fit the devices of the mesh. Other errors are as in `model_folder`.
    """
    check = partial(room.check, given)
    if spans_hosts(room.mesh):
        folder, tensors = remote_model(given, report, check)
        return folder.absolute(), tensors
    return model_folder(given, report, check).absolute(), None


def _stored(given: Given) -> QuantScheme | None:
    """Return the scheme of a folder that was converted with quantized weights; the hub has none."""
    return None if hub_model(given) else stored_scheme(Path(str(given)))
