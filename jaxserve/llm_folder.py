"""Files of an LLM's models, fetched from the hub only if the weights fit the devices."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.checkpoints.hub.names import Given, display_name
from jaxserve.engine.device.lowering import abstract_params
from jaxserve.engine.device.memory import bytes_per_device, device_limit
from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.loading.draft import open_draft
from jaxserve.loading.folder import ModelFiles, open_model
from jaxserve.loading.load_plan import DTYPES
from jaxserve.loading.model_folder import Report, check_architecture, model_folder, remote_model
from jaxserve.models.families.weight_table import Stored
from jaxserve.models.quant import parse_scheme
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.mesh import spans_hosts


def open_llm(
    model: Given, draft_model: Given | None, mesh: Mesh, dtype: str, weights: str, report: Report
) -> tuple[ModelFiles, ModelFiles | None]:
    """Fetch and open the files of a model, and of its draft model if there is one.

    Arguments and errors are as in LLM; `report` is told of the bytes that are fetched.
    """
    if draft_model:
        check_architecture(draft_model)  # before the larger model is fetched
    folder, tensors = model_of_llm(model, mesh, dtype, weights, report)
    draft_folder = model_folder(draft_model, report) if draft_model else None
    files = open_model(folder, tensors)
    return files, open_draft(draft_folder, files) if draft_folder else None


def model_of_llm(
    given: Given, mesh: Mesh, dtype: str, weights: str, report: Report
) -> tuple[Path, Mapping[str, Stored] | None]:
    """Return the folder of a model, and its weights where they are read from the hub.

    The path is absolute: templates are read later, when the program may work in another folder.
    A model of the hub is fetched; where the mesh spans several hosts, each reads its part of the
    weights only. Raises MemoryLimitError, before anything large is fetched, if the weights alone do
    not fit the devices of the mesh. Other errors are as in `model_folder`.
    """
    check = partial(_check_fits, display_name(given), mesh, dtype, weights)
    if spans_hosts(mesh):
        folder, tensors = remote_model(given, report, check)
        return folder.absolute(), tensors
    return model_folder(given, report, check).absolute(), None


def _check_fits(name: str, mesh: Mesh, dtype: str, weights: str, spec: ModelSpec) -> None:
    # What "auto" means the tensors decide; it is never less than bfloat16.
    kept = jnp.dtype(DTYPES.get(dtype, DTYPES["bfloat16"]))
    held = spec.on(mesh.shape["tensor"])
    needed = bytes_per_device(abstract_params(held, kept, mesh, parse_scheme(weights)))
    try:
        limit = device_limit(mesh)
    except ConfigError:  # a device that does not report its memory; --cache-tokens plans it
        return
    if needed > limit:
        raise MemoryLimitError(
            f"{name}: its weights take {needed / 2**30:.2f} GiB of each device, which has "
            f"{limit / 2**30:.2f} GiB, so it is not fetched (more devices with --tensor, or fewer "
            f"bytes with --weights; jaxserve plan MODEL --suggest finds what fits)",
            missing=needed - limit,
        )
