"""python -m checkpoints.convert SRC DST: a Hugging Face folder to an Orbax one, or back with --to
hf.

With --weights the Orbax folder holds quantized weights; then SRC may be an Orbax folder in full
precision too. DST is written under another name beside it and renamed at the end.
"""

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from checkpoints.hf import INDEX, SINGLE_FILE, UNFINISHED, HFCheckpoint
from checkpoints.orbax_store import (
    AS_THEY_ARE,
    MANIFEST,
    WEIGHTS,
    OrbaxCheckpoint,
    is_orbax,
    write_manifest,
)
from checkpoints.orbax_writer import CHUNK_BYTES, Writer
from checkpoints.quantized import dequantized
from sharding.mesh import MeshSpec

# Of the source's files those that are taken along: configs, tokenizers, chat templates, licences.
TAKEN: Final = (".json", ".jinja", ".model", ".txt", ".md", "LICENSE", "NOTICE")
FILE_BYTES: Final = 5 * 10**9  # of a .safetensors file, at most, unless one tensor has more
Report = Callable[[int, int, str], None]  # bytes done, bytes in all, what of


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 when something asked for cannot be done (one line on standard error)."""
    from jaxserve.cli.exits import exit_code
    from jaxserve.errors import JaxserveError

    parser = argparse.ArgumentParser(prog="python -m checkpoints.convert", description=__doc__)
    parser.add_argument("source", metavar="SRC", type=Path, help="the folder to convert")
    parser.add_argument(
        "target", metavar="DST", type=Path, help="the folder to write, which must not exist yet"
    )
    parser.add_argument(
        "--to", choices=("orbax", "hf"), default="orbax", help="format of DST (default: orbax)"
    )
    parser.add_argument(
        "--weights",
        default=AS_THEY_ARE,
        metavar="FORM",
        help="format of the weights in an Orbax folder: auto (as stored), int8, fp8, int4, or int4 "
        "in groups (int4-g32, ...); a +head at the end quantizes the head as well (default: auto)",
    )
    args = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # Orbax says of every layer that it has no OCDBT

    def work() -> int:
        with bar(Console(stderr=True, highlight=False)) as report:
            if args.to == "orbax":
                to_orbax(args.source, args.target, report, weights=args.weights)
            elif args.weights == AS_THEY_ARE:
                to_hf(args.source, args.target, report)
            else:
                raise CheckpointError(
                    f"--weights {args.weights}: --to hf writes none that are quantized (leave it "
                    f"out)"
                )
        return 0

    return exit_code(work, (JaxserveError, CheckpointError))


@contextmanager
def bar(console: Console) -> Iterator[Report]:
    """Bytes, speed and time left."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    told = TextColumn("{task.description}")
    with Progress(
        *columns, told, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=what
        )


def to_orbax(
    source: Path,
    target: Path,
    report: Report,
    chunk_bytes: int = CHUNK_BYTES,
    weights: str = AS_THEY_ARE,
) -> None:
    """Write the folder `target` with the parameters of `source`, a Hugging Face folder.

    They are as one device has them, in the precision of the source, or in a form of
    models/quant.py: then an Orbax folder in full precision is a source too. In memory is one layer
    at a time. CheckpointError or ModelError when something is not as it has to be; then there is no
    target.
    """
    from jaxserve.loading.checkpoint import load_params, open_checkpoint

    checkpoint = open_checkpoint(source)
    if isinstance(checkpoint, OrbaxCheckpoint) and (
        weights == AS_THEY_ARE or checkpoint.weights != AS_THEY_ARE
    ):
        raise CheckpointError(
            f"{source}: is converted already (--to hf converts it back; --weights is for full "
            f"precision)"
        )
    with new_folder(source, target) as folder:
        writer = Writer(folder, chunk_bytes)
        load_params(
            checkpoint,
            MeshSpec().build(jax.devices("cpu")[:1]),
            progress=report,
            weights=weights,
            keep=writer.add,
        )
        writer.finish()
        take_along(source, folder)
        write_manifest(folder, _source_of(checkpoint), weights)


def _source_of(checkpoint: HFCheckpoint | OrbaxCheckpoint) -> Mapping[str, str]:
    """The dtype of every tensor."""
    if isinstance(checkpoint, OrbaxCheckpoint):
        return checkpoint.source
    return {
        name: t.dtype.name for name, t in dequantized(checkpoint.tensors, checkpoint.config).items()
    }


def to_hf(source: Path, target: Path, report: Report, file_bytes: int = FILE_BYTES) -> None:
    """Write the folder `target` with the tensors, names and configs that `source`, an Orbax folder,
    was made from.

    In memory are the tensors of one file. What a quantized source had is bfloat16 now. Errors as
    to_orbax.
    """
    from jaxserve.loading.export import published

    if not is_orbax(source):
        raise CheckpointError(
            f"{source}: is not a folder of this command ({MANIFEST}); --to hf needs one"
        )
    checkpoint = OrbaxCheckpoint.open(source)
    files = list(_filled(published(checkpoint), file_bytes))
    total, done = sum(tensor.nbytes for file in files for tensor in file), 0
    with new_folder(source, target) as folder:
        weight_map = dict[str, str]()
        for number, file in enumerate(files, 1):
            name = (
                SINGLE_FILE
                if len(files) == 1
                else f"model-{number:05}-of-{len(files):05}.safetensors"
            )
            tensors = dict[str, np.ndarray]()
            for tensor in file:
                report(done, total, tensor.name)
                tensors[tensor.name], weight_map[tensor.name] = tensor.read(), name
                done += tensor.nbytes
            save_file(tensors, folder / name, {"format": "pt"})
        take_along(source, folder)
        if len(files) > 1:
            _write_json(
                folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
        if "quantization_config" in checkpoint.config:
            _write_json(
                folder / "config.json",
                {k: v for k, v in checkpoint.config.items() if k != "quantization_config"},
            )
    report(total, total, "")


def _filled(tensors: Iterable[Any], file_bytes: int) -> Iterator[list[Any]]:
    """In their order, as many to a file as it holds."""
    file, size = list[Any](), 0
    for tensor in tensors:
        if file and size + tensor.nbytes > file_bytes:
            yield file
            file, size = [], 0
        file.append(tensor)
        size += tensor.nbytes
    yield file


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def new_folder(source: Path, target: Path) -> Iterator[Path]:
    """A folder beside `target` that becomes it at the end, and is removed when that is not reached.

    If the process is killed the folder stays, and nothing loads from it.
    """
    unfinished = target.with_name(target.name + UNFINISHED)
    if target.exists():
        raise CheckpointError(f"{target}: is there already; name another folder, or remove it")
    if source.resolve() in target.resolve().parents:
        raise CheckpointError(
            f"{target}: is in {source}, whose files are taken along; name a folder elsewhere"
        )
    try:
        unfinished.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{unfinished}: is there already (a conversion that runs, or one that was "
            f"interrupted: then remove it)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{unfinished}: cannot be made ({error.strerror})") from error
    try:
        yield unfinished
        unfinished.rename(target)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{unfinished}: cannot be written ({error})") from error
        raise


def take_along(source: Path, folder: Path) -> None:
    """Copy what is beside the weights."""
    for directory, inner, names in os.walk(source):
        inner[:] = [name for name in inner if not name.startswith(".") and name != WEIGHTS]
        for name in names:
            if name.endswith(TAKEN) and name not in (INDEX, MANIFEST):
                to = folder / Path(directory).relative_to(source) / name
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(directory, name), to)


if __name__ == "__main__":
    sys.exit(main())
