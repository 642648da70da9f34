"""From a checkpoint folder to a model on a mesh: joins the reader, the family's weight-name table and the shards.

The only file that knows both checkpoints and models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from checkpoints.hf import HFCheckpoint
from checkpoints.quantized import check_method, dequantized
from checkpoints.safetensors_reader import check_finite
from jaxserve.errors import ModelError
from jaxserve.models.decoder import ALWAYS_FLOAT32, param_specs
from jaxserve.models.families import FAMILIES
from jaxserve.models.families.family import Family, Stored, Tensor
from jaxserve.models.families.pooling import embeds
from jaxserve.models.fused import PARTS
from jaxserve.models.quant import Quantized, Ranges, Rounding, form_of
from jaxserve.models.spec import ModelSpec
from jaxserve.request import MAX_EOS_IDS
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from sharding.params import ParamSpec, is_param_spec

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, tensor


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint.

    spec: as these devices hold it, with kv_copies of every kv head (ModelSpec.on). parameters: of the checkpoint,
    without copies. fingerprint: of spec, dtypes and folder, for the identity of cached pages.
    """

    spec: ModelSpec
    params: dict
    mesh: Mesh
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    fingerprint: str
    parameters: int
    kv_copies: int


def load(
    folder: Path,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
) -> Model:
    """Load a Hugging Face folder onto the mesh.

    dtype: auto keeps the checkpoint's precision (half and double become bfloat16 and float32), or float32, bfloat16.
    weights: auto leaves them in dtype; or what models/quant.py has, such as int8.
    ModelError or CheckpointError, one line each, when something is not as it has to be.
    """
    checkpoint = HFCheckpoint.open(folder)
    tokenizer = load_tokenizer(folder)
    _, spec = _architecture(checkpoint)
    added = {*tokenizer.special_tokens.values(), *tokenizer.added_tokens.values()}
    if any(token not in added for token in range(spec.vocab_size, tokenizer.vocab_size)):
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary {spec.vocab_size} "
            "(the files are not of one checkpoint)"
        )
    eos_ids = _eos_ids(checkpoint, tokenizer, spec)
    params = load_params(checkpoint, mesh, dtype, progress, weights)
    held = spec.on(mesh.shape["tensor"])
    fingerprint = sha256(repr((held, dtype, weights, str(folder.resolve()))).encode()).hexdigest()
    leaves = jax.tree.leaves(param_specs(spec, params["embed"].dtype), is_leaf=is_param_spec)
    parameters, copies = sum(math.prod(leaf.shape) for leaf in leaves), held.num_kv_heads // spec.num_kv_heads
    return Model(held, params, mesh, tokenizer, eos_ids, fingerprint, parameters, copies)


def load_params(
    checkpoint: HFCheckpoint,
    mesh: Mesh,
    dtype: str = "auto",
    progress: Progress = lambda done, total, what: None,
    weights: str = "auto",
) -> dict:
    """The parameters of `spec.on` these devices, each read from the memory map straight into its shards.

    Once; what is quantized twice, for its scales and then for its numbers.
    """
    family, spec = _architecture(checkpoint)
    spread = spec.on(mesh.shape["tensor"])
    tensors = dequantized(_with_prefix(checkpoint.tensors), checkpoint.config)
    table = _match(family, spec, tensors)
    kept = DTYPES[dtype] if dtype in DTYPES else _checkpoint_dtype(dtype, table, tensors)
    params: Any = param_specs(spread, jnp.dtype(kept), form_of(weights))
    total, done = sum(param.nbytes for param in jax.tree.leaves(params, is_leaf=is_param_spec)), 0
    for path, rows in _by_parameter(table).items():
        progress(done, total, rows[0].name)
        holder = params
        for step in path[:-1]:
            holder = holder[step]
        done += sum(param.nbytes for param in jax.tree.leaves(holder[path[-1]], is_leaf=is_param_spec))
        holder[path[-1]] = _load_parameter(str(path[-1]), rows, holder[path[-1]], tensors, (spec, spread), mesh)
    progress(total, total, "")
    return params


def _by_parameter(table: list[Tensor]) -> dict[tuple[str | int, ...], list[Tensor]]:
    """Rows of the weight-name table by the path of the parameter that they are, or are parts of."""
    grouped: dict[tuple[str | int, ...], list[Tensor]] = {}
    for row in table:
        fused = PARTS.get(str(row.path[-1]))
        grouped.setdefault((*row.path[:-1], fused.fused) if fused else row.path, []).append(row)
    return grouped


def _architecture(checkpoint: HFCheckpoint) -> tuple[Family, ModelSpec]:
    """What config.json says, and the files beside it: whether the model embeds."""
    family, spec = read_spec(checkpoint.config)
    return family, replace(spec, embeds=embeds(checkpoint.modules))


def _with_prefix(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Under the names that a whole model's have: a decoder that was stored without its head lacks their beginning."""
    if "embed_tokens.weight" not in tensors:
        return tensors
    return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in tensors.items()}


def read_spec(config: Mapping[str, Any]) -> tuple[Family, ModelSpec]:
    """The family that config.json names, and its architecture."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"config.json: architectures is {named!r}; it must be a list of names")
    known = [name for name in named if name in FAMILIES]
    if not known:
        raise ModelError(
            f"config.json: architectures {named!r} are not implemented (implemented: {', '.join(FAMILIES)})"
        )
    check_method(config)
    family = FAMILIES[known[0]]
    return family, family.spec_from_hf(config)


def _checkpoint_dtype(asked: str, table: list[Tensor], tensors: Mapping[str, Stored]) -> np.dtype:
    if asked != "auto":
        raise ModelError(f"--dtype {asked!r}: choose auto, {' or '.join(DTYPES)}")
    stored = {tensors[row.name].dtype for row in table if row.path[-1] not in ALWAYS_FLOAT32}
    if any(not _is_float(dtype) for dtype in stored):
        raise ModelError(
            f"the checkpoint stores weights as {', '.join(sorted(map(str, stored)))}; floating point is needed"
        )
    return DTYPES["float32"] if any(dtype.itemsize > 2 for dtype in stored) else DTYPES["bfloat16"]


def _is_float(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2


def _match(family: Family, spec: ModelSpec, tensors: Mapping[str, Stored]) -> list[Tensor]:
    """The weight-name table; ModelError when a tensor is left over or missing."""
    table = family.tensors(spec)
    wanted = {row.name for row in table}
    missing = sorted(wanted - set(tensors))
    ignored = (*family.ignored(spec), *(("lm_head.weight",) if spec.embeds else ()))
    extra = sorted(name for name in set(tensors) - wanted if not any(fnmatchcase(name, pattern) for pattern in ignored))
    if spec.tied_head and "lm_head.weight" in extra:  # some publishers store the tied head twice
        if not np.array_equal(tensors["lm_head.weight"][:], tensors["model.embed_tokens.weight"][:]):
            raise ModelError("config.json ties the head to the embedding, but lm_head.weight differs from it")
        extra.remove("lm_head.weight")
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {_some(missing)}")
    if extra:
        raise ModelError(
            f"the checkpoint has {len(extra)} tensors that config.json does not account for: {_some(extra)}"
        )
    return table


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _load_parameter(
    name: str,
    rows: list[Tensor],
    param: ParamSpec | Quantized,
    tensors: Mapping[str, Stored],
    specs: tuple[ModelSpec, ModelSpec],
    mesh: Mesh,
) -> jax.Array | Quantized:
    """A parameter from the tensors that it holds, each shard read from the memory map straight to where it belongs.

    specs: of the checkpoint, and of what these devices hold.
    """
    spread, whole = specs[1], param.values if isinstance(param, Quantized) else param
    held = sum(row.size(whole.axes, spread.sizes(row.block)) for row in rows)
    if held != math.prod(whole.shape):
        raise ModelError(f"the weight-name table has {held} of the {math.prod(whole.shape)} numbers of {rows[0].path}")
    for row in rows:
        if not _is_float(tensors[row.name].dtype):
            raise ModelError(f"tensor {row.name} is stored as {tensors[row.name].dtype}; floating point is needed")

    def read(asked: Ranges, dtype: np.dtype = whole.dtype) -> np.ndarray:
        found = np.empty([len(part) for part in asked], dtype)
        for row in rows:
            _read_into(found, asked, row, tensors[row.name], whole.axes, specs)
        return found

    if not isinstance(param, Quantized):
        return _sharded(param, mesh, read)
    rounding = Rounding(name, param, partial(read, dtype=np.dtype(np.float32)))
    values, scales = _sharded(param.values, mesh, rounding.values), _sharded(param.scales, mesh, rounding.scales)
    return Quantized(values, scales, param.form)


def _sharded(param: ParamSpec, mesh: Mesh, read: Callable[[Ranges], np.ndarray]) -> jax.Array:
    """An array of the shards that `read` gives of the ranges asked for; devices that have the same read it once."""
    read_once = cache(read)

    def shard(index: Any) -> np.ndarray:
        return read_once(tuple(range(size)[part] for size, part in zip(param.shape, index, strict=True)))

    return jax.make_array_from_callback(param.shape, param.format(mesh), shard)


def _read_into(
    whole: np.ndarray,
    asked: Sequence[range],
    row: Tensor,
    stored: Stored,
    axes: str,
    specs: tuple[ModelSpec, ModelSpec],
) -> None:
    """A row's share of one shard of its parameter: of the entries `asked` along each of the parameter's axes."""
    spec, held = specs
    places = row.places(held.sizes(row.block))
    wanted, within, target = "", dict[str, slice](), list[slice | int]()
    for letter, part in zip(axes, asked, strict=True):
        if letter not in places:
            wanted += letter
            within[letter] = slice(part.start, part.stop)
            target.append(slice(None))
        else:
            letters, at = places[letter]
            begin, end = max(at.start, part.start), min(at.stop, part.stop)
            if begin >= end:
                return
            wanted += letters
            target.append(slice(begin - part.start, end - part.start) if letters else begin - part.start)
    copies = held.num_kv_heads // spec.num_kv_heads
    values = _read(row, stored, spec.sizes(row.block), wanted, within, copies)
    check_finite(row.name, values)
    _copy(values, whole[tuple(target)])


def _read(
    row: Tensor, stored: Stored, sizes: Mapping[str, int], wanted: str, within: dict[str, slice], copies: int
) -> np.ndarray:
    """Tensor.read, the kv heads copied so many times; `within` counts the copies."""
    if copies == 1 or "K" not in wanted:
        return row.read(stored, sizes, wanted, within)
    heads = within.pop("K")
    spread = _spread(row.read(stored, sizes, wanted, within), wanted, copies)
    return spread[tuple(heads if letter == "K" else slice(None) for letter in wanted)]


def _spread(view: np.ndarray, axes: str, copies: int) -> np.ndarray:
    """Every kv head so many times, its queries (G, which follows K) shared out among them."""
    at = axes.index("K")
    if "G" not in axes:
        return view.repeat(copies, axis=at)
    heads, queries = view.shape[at : at + 2]
    return view.reshape(*view.shape[:at], heads * copies, queries // copies, *view.shape[at + 2 :])


def _copy(view: np.ndarray, target: np.ndarray) -> None:
    """In tiles where the view turns a matrix over: numpy alone takes three times as long there."""
    near = int(np.argmin(view.strides)) if view.ndim else 0  # the dimension that is contiguous in the file
    if near >= view.ndim - 1:
        target[...] = view
        return
    tile = [1] * view.ndim
    tile[near], tile[-1] = 128, 32
    for corner in product(*(range(0, size, step) for size, step in zip(view.shape, tile, strict=True))):
        at = tuple(slice(start, start + step) for start, step in zip(corner, tile, strict=True))
        target[at] = view[at]


def _eos_ids(checkpoint: HFCheckpoint, tokenizer: Tokenizer, spec: ModelSpec) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the tokenizer."""
    for source in (checkpoint.generation_config, checkpoint.config):
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = tuple(ids) if isinstance(ids, list) else (ids,)
            if not all(type(i) is int and 0 <= i < spec.vocab_size for i in ids) or len(ids) > MAX_EOS_IDS:
                raise ModelError(
                    f"eos_token_id {ids!r}: at most {MAX_EOS_IDS} ids of the vocabulary (0 to {spec.vocab_size - 1})"
                )
            return ids
    return tokenizer.eos_ids
