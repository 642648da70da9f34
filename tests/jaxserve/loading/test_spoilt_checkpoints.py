"""Checkpoints of every family with one tensor spoilt: each is refused in one line that names it.

The checkpoints are the golden ones. Of those of a family, one tensor of each kind is spoilt: the
layers of a model have the same kinds, and a kind that an earlier checkpoint of the family had is
not spoilt again. A tensor that the model does not need may be missing, and one of a quantized
weight may be stored otherwise if it means the same. Nothing else may be loaded or raised.
"""

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, HFCheckpoint
from jaxserve.errors import ModelError
from jaxserve.loading import parameters
from jaxserve.loading.load_plan import plan_load
from jaxserve.loading.spec import ModelCheckpoint, read_architecture
from jaxserve.loading.tensor_names import NAMINGS, is_of, naming_of
from jaxserve.models.families import FAMILIES
from tests.jaxserve.models.decoder_harness import one_device_mesh
from tests.slow_cases import slow_but

GOLDEN = Path(__file__).parents[2] / "golden"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LONGEST = 300  # characters of an error
# Last parts of the names of tensors that a quantized weight consists of.
PARTS = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_shape|weight_scale|weight_zero_point)$"
    r"|_(blocks|scales|scale_inv)$"
)
NOT_READ = ("*.activation_scale", "*.input_scale")  # activations stay in full precision
# Weights of a layer that checkpoints of some families have fused, of others split.
FUSED_AND_SPLIT = (
    *("self_attn.qkv_proj.weight", "self_attn.q_proj.weight"),
    *("mlp.gate_up_proj.weight", "mlp.gate_proj.weight"),
    *("mlp.experts.gate_up_proj", "mlp.experts.0.gate_proj.weight"),
)
# Words about a shape, which is the one that packed numbers would have, or of the other part.
ANY_SHAPE = r"\[[\d, ]*\]|has \d+ inputs"


def goldens() -> dict[str, list[Path]]:
    """Return the folders of each family, by the first architecture that has its table."""
    names = {id(family): name for name, family in reversed(FAMILIES.items())}
    folders = defaultdict[str, list[Path]](list)
    for path in sorted([*GOLDEN.glob("*/config.json"), *GOLDEN.glob("quantized/*/config.json")]):
        (architecture,) = json.loads(path.read_text())["architectures"]
        folders[names[id(FAMILIES[architecture])]].append(path.parent)
    return folders


FOLDERS = goldens()
# Plain, fused, and stacked tensors; experts of each spelling, latent attention, states, images.
OF_EACH_LAYOUT = (
    *("DeepseekV3ForCausalLM", "Gemma3ForConditionalGeneration", "GptOssForCausalLM"),
    *("GraniteMoeForCausalLM", "Lfm2MoeForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM"),
    "Phi3ForCausalLM",
)


class Golden:
    """A golden checkpoint, of which tensors are replaced in memory before it is loaded."""

    def __init__(self, folder: Path):
        checkpoint = HFCheckpoint.open(folder)
        self.folder = folder
        self.tensors: dict[str, np.ndarray] = dict(checkpoint.tensors)
        self.naming = naming_of(self.tensors)
        self.source: ModelCheckpoint = read_architecture(checkpoint)
        self._checkpoint = checkpoint

    @functools.cached_property
    def params(self) -> dict:
        return self.load({})

    def load(
        self, changed: Mapping[str, np.ndarray | None], dtype: str = "auto", weights: str = "auto"
    ) -> dict:
        """Load the checkpoint with other tensors; None takes one out."""
        merged = {**self.tensors, **changed}
        tensors = {name: each for name, each in merged.items() if each is not None}
        source = replace(self.source, checkpoint=replace(self._checkpoint, tensors=tensors))
        return parameters.load_params(plan_load(source, one_device_mesh(), dtype, weights))

    def refusal(
        self, changed: Mapping[str, np.ndarray | None], dtype: str = "auto", weights: str = "auto"
    ) -> str:
        """Return the line that refuses the checkpoint with other tensors; "" if it is loaded."""
        return refusal(lambda: self.load(changed, dtype, weights))

    def is_read(self, name: str) -> bool:
        """Return whether a tensor is one that the model needs."""
        family = self.source.family
        plain = self.naming.to_plain(name)
        unread = (*family.ignored(self.source.spec), *NOT_READ)
        return not any(fnmatchcase(plain, pattern) for pattern in unread) and not any(
            is_of(tower, plain) for tower in family.towers
        )

    def is_part(self, name: str) -> bool:
        """Return whether a tensor is one of several that a quantized weight consists of."""
        return self._is_quantized and PARTS.search(name) is not None

    def may_be_transposed(self, name: str) -> bool:
        """Return whether the family reads a tensor in two layouts, which its shape tells apart."""
        rows = self.source.family.tensors(self.source.spec)
        return any(row.other_axes for row in rows if row.name == self.naming.to_plain(name))

    @property
    def _is_quantized(self) -> bool:
        return "quantization_config" in self._checkpoint.config

    def kind(self, name: str) -> tuple[object, ...]:
        """Return what a tensor shares with those of other layers, experts and checkpoints."""
        dimensions = self.tensors[name].ndim
        if self.folder.parent.name == "quantized":  # one module of each format is enough
            return self.folder.name, name.rpartition(".")[2], dimensions
        plain = re.sub(r"\d+", "0", self.naming.to_plain(name))
        return plain, dimensions, self._is_quantized


def first_of_each_kind(family: str) -> Iterator[tuple[Golden, list[str]]]:
    """Yield checkpoints of a family with the tensors whose kinds were in none before them."""
    seen = set[tuple[object, ...]]()
    for folder in FOLDERS[family]:
        golden = Golden(folder)
        new = {golden.kind(name): name for name in reversed(golden.tensors) if golden.is_read(name)}
        names = [name for kind, name in new.items() if kind not in seen]
        seen |= new.keys()
        if names:
            yield golden, names


def other_shapes(golden: Golden, name: str) -> Iterator[np.ndarray]:
    """Yield the tensor with a row too many, with a dimension more or fewer, and transposed."""
    tensor = golden.tensors[name]
    yield np.concatenate([tensor, tensor[:1]]) if tensor.ndim else np.stack([tensor, tensor])
    yield tensor.reshape(-1) if tensor.ndim > 1 else tensor.reshape(1, -1)
    if tensor.ndim > 1 and len(set(tensor.shape[-2:])) > 1 and not golden.may_be_transposed(name):
        yield np.ascontiguousarray(tensor.swapaxes(-1, -2))


def as_integers(tensor: np.ndarray) -> np.ndarray:
    """Return the tensor in int64: the same numbers where it has integers."""
    is_whole = tensor.dtype.kind in "iu"
    return tensor.astype(np.int64) if is_whole else np.zeros(tensor.shape, np.int64)


def not_finite(name: str, tensor: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the tensor with NaN as its first number and infinity as its last, if it has numbers."""
    if tensor.dtype.kind not in "iu":
        yield with_number(tensor, 0, math.nan)
        yield with_number(tensor, -1, math.inf)
    elif name.endswith("_scales"):  # powers of two, of which the largest is NaN
        yield with_number(tensor, 0, 255)


def with_number(tensor: np.ndarray, at: int, number: float) -> np.ndarray:
    spoilt = tensor.copy()
    spoilt.reshape(-1)[at] = number
    return spoilt


def refusal(load: Callable[[], object]) -> str:
    """Return the line that refuses a checkpoint; "" if it is loaded."""
    try:
        load()
    except (ModelError, CheckpointError) as error:
        text = str(error)
        assert len(text.splitlines()) == 1
        assert len(text) <= LONGEST, text
        return text
    return ""


def check_spoilt(golden: Golden, name: str, tensor: np.ndarray | None, said: str) -> None:
    """Check that the tensor in place of the right one is refused, and with what words."""
    loaded = list[dict]()
    text = refusal(lambda: loaded.append(golden.load({name: tensor})))
    if loaded:
        assert golden.is_part(name), (
            f"{golden.folder.name}: {name} is loaded, which has to be: {said}"
        )
        jax.tree.map(np.testing.assert_array_equal, loaded[0], golden.params)
        return
    assert re.search(said, text), (name, text)
    if golden.is_part(name) and re.search(r"scales|blocks|NaN", text):
        # Both parts are named, of which either may be the wrong one, or what they make together.
        assert PARTS.sub("", name) in text, (name, text)
    else:
        assert name in text, (name, text)


def test_the_goldens_have_every_family() -> None:
    """Names of one class, such as the two of ERNIE, share a family's table."""
    tables = {id(FAMILIES[name]) for name in FOLDERS}
    assert not {name for name, family in FAMILIES.items() if id(family) not in tables}


@pytest.mark.parametrize("family", slow_but(list(FOLDERS), OF_EACH_LAYOUT))
def test_every_kind_of_tensor_of_every_family(family: str) -> None:
    for golden, names in first_of_each_kind(family):
        golden.load({})
        for name in names:
            tensor = golden.tensors[name]
            check_spoilt(golden, name, None, r"lacks 1 tensors: |is missing$|are missing$")
            for shape in other_shapes(golden, name):
                said = ANY_SHAPE if golden.is_part(name) else re.escape(str(list(shape.shape)))
                check_spoilt(golden, name, shape, said)
            check_spoilt(golden, name, as_integers(tensor), "int64")
            for numbers in not_finite(name, tensor):
                check_spoilt(golden, name, numbers, "of .* values are NaN or infinite as ")


@pytest.mark.parametrize("family", slow_but(list(FOLDERS), OF_EACH_LAYOUT))
def test_a_tensor_that_two_files_have(family: str, tmp_path: Path) -> None:
    """Such a tensor is refused, unless the index says which file's to take."""
    golden, names = next(first_of_each_kind(family))
    (tmp_path / "config.json").symlink_to(golden.folder / "config.json")
    (tmp_path / "first.safetensors").symlink_to(golden.folder / "model.safetensors")
    for name in names:
        tensor = golden.tensors[name]
        other = np.full_like(tensor, 3)
        save_file({name: other, "other": other}, tmp_path / "second.safetensors")
        places = dict.fromkeys(golden.tensors, "first.safetensors")
        places["other"] = "second.safetensors"
        write_index(tmp_path, places)
        assert HFCheckpoint.open(tmp_path).tensors[name].tobytes() == tensor.tobytes()
        del places[name]
        write_index(tmp_path, places)
        assert name in both_files(tmp_path)
        (tmp_path / INDEX).unlink()
    assert names[-1] in both_files(tmp_path)


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def both_files(folder: Path) -> str:
    """Return the name in the line that refuses a tensor of both files."""
    text = refusal(lambda: HFCheckpoint.open(folder))
    found = re.search(r"second.safetensors: tensor '(.*)' is also in first.safetensors and", text)
    assert found, text
    return found[1]


@pytest.mark.parametrize("family", slow_but(list(FOLDERS), OF_EACH_LAYOUT))
def test_a_tensor_that_is_there_under_another_name(family: str) -> None:
    """No family reads a tensor below two prefixes, or a weight that is both fused and split."""
    golden, names = next(first_of_each_kind(family))
    plain = [golden.naming.to_plain(name) for name in names]
    others = {naming.from_plain(name) for naming in NAMINGS for name in plain}
    others |= {golden.naming.from_plain(f"model.layers.0.{name}") for name in FUSED_AND_SPLIT}
    for name in others - golden.tensors.keys():
        text = golden.refusal({name: np.ones((2, 2), np.float32)})
        own = golden.naming.from_plain(name)
        assert name in text or text.endswith(f"below two prefixes: {own}"), (name, text)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda right: right.reshape(-1),
        lambda right: right.T,
        lambda right: with_number(right, 0, math.nan),
        lambda right: right.astype(np.int64),
    ],
)
def test_a_head_that_is_tied_and_stored(spoil: Callable[[np.ndarray], np.ndarray]) -> None:
    golden = Golden(GOLDEN / "llama_tied")
    embedding = golden.tensors[EMBEDDING]
    assert not golden.refusal({HEAD: embedding})
    assert f"{HEAD} differs from" in golden.refusal({HEAD: spoil(embedding)})
    both = golden.refusal({HEAD: spoil(embedding), EMBEDDING: spoil(embedding)})
    assert EMBEDDING in both or f"{HEAD} differs from" in both
    gone = golden.refusal({HEAD: embedding, EMBEDDING: None})
    assert gone == f"the checkpoint lacks 1 tensors: {EMBEDDING}"


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_a_bias_that_no_layer_has(shape: tuple[int, ...]) -> None:
    """A bias of zeros adds nothing, whatever its shape."""
    golden = Golden(GOLDEN / "llama_gqa")
    name = "model.layers.0.self_attn.q_proj.bias"
    assert not golden.refusal({name: np.zeros(shape, np.float32)})
    for number in (1.0, math.nan):
        text = golden.refusal({name: np.full(shape, number, np.float32)})
        assert text.endswith(f"does not account for: {name}")


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float64", "float32"), ("float64", "bfloat16"), ("float32", "bfloat16")],
)
def test_numbers_beyond_the_type_that_is_loaded(stored: str, dtype: str) -> None:
    """A number that would become infinite is refused as one that is."""
    golden = Golden(GOLDEN / "llama_gqa")
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        tensor = golden.tensors[name].astype(stored)
        for number in (np.finfo(stored).max, np.finfo(stored).min, math.nan, math.inf):
            text = golden.refusal({name: with_number(tensor, 1, float(number))}, dtype)
            assert f"'{name}': 1 of {tensor.size:,} values are NaN or infinite as {dtype}" in text


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_numbers_that_are_quantized_on_loading(weights: str) -> None:
    golden, names = next(first_of_each_kind("LlamaForCausalLM"))
    for name in names:
        for number in (math.nan, math.inf):
            spoilt = {name: with_number(golden.tensors[name], -1, number)}
            text = golden.refusal(spoilt, weights=weights)
            assert f"'{name}': 1 of " in text
            assert "values are NaN or infinite" in text
