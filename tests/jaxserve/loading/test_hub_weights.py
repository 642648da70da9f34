"""Models whose weights are read from the hub by ranges: the parameters of their folders."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.checkpoints.hub import ranges
from jaxserve.checkpoints.hub.lookup import find
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.loading.spec import open_checkpoint
from jaxserve.sharding.mesh import MeshSpec
from tests.fake_hub import FakeHub, fake_hub
from tests.jaxserve.loading.loaded import load_params
from tests.slow_cases import slow_but

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = (
    *("llama_gqa", "phi3_longrope", "qwen3_moe_gqa", "gpt_oss_mxfp4", "deepseek_v3_fp8"),
    *("glm4_gqa", "ministral3_fp8"),
    *("quantized/awq", "quantized/gptq_3bit", "quantized/gptq_4bit"),
    *("quantized/compressed_fp8_block", "quantized/compressed_mixed"),
    *("quantized/compressed_w4a16_asymmetric", "quantized/compressed_w8a8"),
)
QUICK = (
    *("llama_gqa", "gpt_oss_mxfp4", "glm4_gqa", "ministral3_fp8"),
    *("quantized/gptq_3bit", "quantized/compressed_w4a16_asymmetric"),
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with fake_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.mark.parametrize("case", slow_but(CASES, QUICK))
def test_parameters_are_those_of_the_folder(
    hub: FakeHub, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "SMALL", 64)  # so that tensors of these tiny models are large
    name = f"golden/{case.replace('/', '-')}"
    hub.add(name, GOLDEN / case)
    snapshot = find(HubModel(name))
    mesh = MeshSpec(tensor=2).build(jax.devices())
    in_folder = load_params(open_checkpoint(GOLDEN / case), mesh)
    on_hub = load_params(open_checkpoint(snapshot.folder, ranges.remote_tensors(snapshot)), mesh)
    jax.tree.map(np.testing.assert_array_equal, in_folder, on_hub)
    assert not list(snapshot.folder.glob("*.safetensors"))
