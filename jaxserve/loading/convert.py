"""Converts checkpoints: work of `jaxserve convert`, once its arguments are known to be right."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from rich.console import Console
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, SINGLE_FILE
from jaxserve.checkpoints.hub.names import Given
from jaxserve.checkpoints.new_folder import copy_other_files, new_folder
from jaxserve.checkpoints.orbax_store import (
    AS_STORED,
    MANIFEST,
    OrbaxCheckpoint,
    is_orbax,
    write_manifest,
)
from jaxserve.checkpoints.orbax_writer import CHUNK_BYTES, Writer
from jaxserve.interrupts import HeldInterrupts, interrupts_raise
from jaxserve.loading.export import PublishedTensor, published_tensors
from jaxserve.loading.load_plan import plan_load
from jaxserve.loading.match import note_on_towers
from jaxserve.loading.model_folder import model_folder
from jaxserve.loading.parameters import load_params
from jaxserve.loading.spec import ModelCheckpoint, open_checkpoint, read_architecture
from jaxserve.progress import Bar
from jaxserve.sharding.mesh import MeshSpec

FILE_BYTES: Final = 5 * 10**9  # limit of a .safetensors file, unless one tensor is larger
Report = Callable[[int, int, str], None]  # bytes done, bytes in total, name of the tensor


def convert(source: Given, target: Path, to: str, weights: str) -> None:
    """Convert as the flags of the command say, with a bar on a terminal.

    Args:
        source: Folder, or name on the hub.

    Raises:
        JaxserveError, CheckpointError: The source cannot be converted; then there is no target.
    """
    jax.config.update("jax_platforms", "cpu")  # before any device is asked for
    # Orbax logs for every layer that it is written without OCDBT.
    logging.getLogger("absl").setLevel(logging.ERROR)
    console = Console(stderr=True, highlight=False)
    with Bar(console, "downloading", in_bytes=True) as bar:
        folder = model_folder(source, bar.update)
    # After Ctrl-C the unfinished folder is removed.
    with (
        interrupts_raise(),
        HeldInterrupts() as interrupts,
        Bar(console, "converting", in_bytes=True) as bar,
    ):

        def report(done: int, total: int, name: str) -> None:
            interrupts.pass_on()
            bar.update(done, total, name)

        note = None
        if to == "orbax":
            note = to_orbax(folder, target, report, weights=weights)
        else:
            to_hf(folder, target, report)
    if note:
        console.print(note, style="dim", soft_wrap=True, markup=False)


def to_orbax(
    source: Path,
    target: Path,
    report: Report,
    chunk_bytes: int = CHUNK_BYTES,
    weights: str = AS_STORED,
) -> str | None:
    """Write the Orbax folder `target` with the parameters of `source`.

    Parameters are written as one device has them, in the source's precision or in a quantization
    scheme of models/quant.py. `source` is a Hugging Face folder; to quantize, it may also be an
    Orbax folder in full precision. One layer at a time is in memory. Returns a line on tensors of
    the source that are left out, or None. CheckpointError or ModelError when the source cannot be
    converted; then there is no target.
    """
    checkpoint = open_checkpoint(source)
    if isinstance(checkpoint, OrbaxCheckpoint):
        would_change = weights != AS_STORED and checkpoint.weights == AS_STORED
        if not would_change:
            raise CheckpointError(
                f"{source} is converted already (--to hf converts it back; --weights is for full "
                f"precision)"
            )
    with new_folder(source, target) as folder:
        writer = Writer(folder, chunk_bytes)
        mesh = MeshSpec().build(jax.devices("cpu")[:1])
        architecture = read_architecture(checkpoint)
        plan = plan_load(architecture, mesh, weights=weights)
        load_params(plan, report, keep=writer.add)
        writer.finish()
        copy_other_files(source, folder)
        # The manifest comes last: it has the hashes of all other files, and a folder without it
        # is refused.
        write_manifest(folder, _source_dtypes(architecture), weights)
    return note_on_towers(architecture.family, checkpoint.tensors)


def _source_dtypes(source: ModelCheckpoint) -> Mapping[str, str]:
    """Return the dtype of every tensor of the Hugging Face checkpoint, by name."""
    if isinstance(source.checkpoint, OrbaxCheckpoint):
        return source.checkpoint.source
    return {name: tensor.dtype.name for name, tensor in source.stored.items()}


def to_hf(source: Path, target: Path, report: Report, file_bytes: int = FILE_BYTES) -> None:
    """Write the folder `target` with the tensors and configs that `source` was converted from.

    `source` is an Orbax folder. The tensors of one file are in memory at a time. Tensors that were
    quantized in the original checkpoint are written as bfloat16. Errors as to_orbax.
    """
    if not is_orbax(source):
        raise CheckpointError(
            f"{source} is not a folder of this command ({MANIFEST}); --to hf needs one"
        )
    checkpoint = OrbaxCheckpoint.open(source)
    files = list(_split_into_files(published_tensors(checkpoint), file_bytes))
    total = sum(tensor.nbytes for file in files for tensor in file)
    with new_folder(source, target) as folder:
        weight_map = _write_tensors(folder, files, report, total)
        copy_other_files(source, folder)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(folder / INDEX, index)
        if "quantization_config" in checkpoint.config:
            config = dict(checkpoint.config)
            del config["quantization_config"]
            _write_json(folder / "config.json", config)
    report(total, total, "")


def _write_tensors(
    folder: Path, files: Sequence[Sequence[PublishedTensor]], report: Report, total: int
) -> dict[str, str]:
    """Write the .safetensors files; return the name of each tensor's file."""
    done = 0
    weight_map = dict[str, str]()
    for number, file in enumerate(files, 1):
        name = SINGLE_FILE
        if len(files) > 1:
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = dict[str, np.ndarray]()
        for tensor in file:
            report(done, total, tensor.name)
            tensors[tensor.name] = tensor.read()
            weight_map[tensor.name] = name
            done += tensor.nbytes
        save_file(tensors, folder / name, {"format": "pt"})
    return weight_map


def _split_into_files(
    tensors: Iterable[PublishedTensor], file_bytes: int
) -> Iterator[list[PublishedTensor]]:
    """Yield the tensors of each file, in order, as many as fit."""
    file = list[PublishedTensor]()
    size = 0
    for tensor in tensors:
        if file and size + tensor.nbytes > file_bytes:
            yield file
            file = []
            size = 0
        file.append(tensor)
        size += tensor.nbytes
    yield file


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
