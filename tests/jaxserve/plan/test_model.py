"""The models that ship with the planner, and what is said of those that cannot be read."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.errors import ConfigError, ModelError
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.families import FAMILIES
from jaxserve.models.quant import SCHEMES
from jaxserve.plan.model import weights_dtype, weights_scheme
from jaxserve.plan.model_config import read_config, shipped
from jaxserve.sharding.params import is_param_spec

# As the publishers count them.
PARAMETERS = {
    "deepseek-v3": 671_026_419_200,
    "gemma3-27b": 27_009_346_304,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-27b": 26_895_998_464,  # of its text part
}


def test_all_are_here() -> None:
    assert shipped() == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_shipped_model_is_the_published_one(name: str) -> None:
    """Parameters are as published, unless the family is not implemented."""
    found, config = read_config(name)
    assert found == name and weights_dtype("auto", config) == jnp.bfloat16
    if not set(config["architectures"]) & set(FAMILIES):
        with pytest.raises(ModelError, match="are not implemented"):
            read_spec(config)
        return
    leaves = jax.tree.leaves(
        param_specs(read_spec(config)[1], jnp.dtype("bfloat16")), is_leaf=is_param_spec
    )
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(
        PARAMETERS[name], rel=1e-3
    )


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float16"}')
    (tmp_path / "other.json").write_text("{}")
    assert read_config(str(folder)) == ("mine", {"dtype": "float16"})
    assert read_config(str(folder / "config.json"))[0] == "mine"
    assert read_config(str(tmp_path / "other.json")) == ("other", {})
    with pytest.raises(ModelError, match="No such file"):
        read_config(str(tmp_path / "nothing"))
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not an object"):
        read_config(str(tmp_path / "bad.json"))


def test_dtypes() -> None:
    assert weights_dtype("auto", {"torch_dtype": "float16"}) == jnp.bfloat16
    assert weights_dtype("float32", {}) == jnp.float32
    with pytest.raises(ConfigError, match="does not say its dtype"):
        weights_dtype("auto", json.loads("{}"))
    assert weights_dtype("int8", {"dtype": "float16"}) == jnp.bfloat16
    assert weights_scheme("auto") is None and weights_scheme("float32") is None
    assert weights_scheme("int4-g64+head") == replace(SCHEMES["int4-g64"], head=True)
    with pytest.raises(
        ConfigError,
        match="--weights is int3; choose one of auto, float32, bfloat16, int8",
    ):
        weights_scheme("int3")
