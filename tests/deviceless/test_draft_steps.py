"""Steps with a draft model, as the compilers of a TPU and an H200 build them.

The draft model's pages are updated in place too.
"""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxserve.config import resolve
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.draft_model import DraftModel, ModelDrafter
from jaxserve.engine.device.lowering import Lowering, abstract_params
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.hlo.inspection import inspect
from jaxserve.plan.hlo.parser import parse
from tests.deviceless.pallas_calls import pallas_calls
from tests.deviceless.test_steps import CACHE, OPTIONS, lowering, temporaries_bound

# Two layers with the sizes of Qwen3-0.6B, whose heads have 128 numbers. With heads of 64, a TPU's
# compiler would transpose the queries' weights in every step.
DRAFT = ModelSpec(
    "qwen3",
    151936,
    1024,
    2,
    16,
    8,
    128,
    3072,
    1e-6,
    8192,
    Rope(1e6),
    tied_head=True,
    qk_norm="head",
)
DRAFTS = 3
ROWS = 16
VERIFY = Bucket("verify", ROWS, ROWS * (1 + DRAFTS), drafts=DRAFTS)
CATCH_UP = Bucket("draft", ROWS, 256)


# Calls of kernels in two layers. A verify step contains the draft model twice: in the loop that
# drafts, and for the last drafted token. A GPU leaves out the last layer's attention of that token,
# since no result depends on it. Each step is so small that a GPU needs one call per layer.
CALLS = {
    ("v5e", VERIFY): {"paged_attention": 2 + 2 + 2, "page_write": 2},
    ("v5e", CATCH_UP): {"paged_attention": 2, "page_write": 2},
    ("h200", VERIFY): {"paged_attention": 2 + 1 + 2},
    ("h200", CATCH_UP): {"paged_attention": 2},
}


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize("bucket", [VERIFY, CATCH_UP], ids=str)
@pytest.mark.parametrize(("chip", "tensor"), [("v5e", 2), ("h200", 1)])
def test_in_place_and_without_copies(chip: str, tensor: int, bucket: Bucket) -> None:
    plain = lowering(chip, tensor)
    options = replace(OPTIONS, max_batch=ROWS, speculate="draft", draft_tokens=DRAFTS)
    config = resolve(
        options, max_positions=8192, lanes=1, affordable_tokens=CACHE, weights="bfloat16"
    )
    held = DRAFT.on(tensor)
    draft = DraftModel(held, abstract_params(held, jnp.dtype(jnp.bfloat16), plain.mesh))
    steps = Lowering(
        plain.spec, plain.params, config, plain.mesh, ModelDrafter(draft, config, plain.mesh)
    )
    compiled = steps.step(bucket).compile()
    found = inspect(compiled, steps)
    assert found.aliased >= bytes_per_device(steps.state)
    assert not found.copies
    assert found.temporaries < temporaries_bound(bucket)
    assert pallas_calls(parse(compiled.as_text() or "")) == CALLS[chip, bucket]
