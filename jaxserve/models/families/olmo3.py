"""OLMo 3: OLMo 2 with a window in three of four layers, whose rope is not scaled."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families import olmo2
from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.weight_table import Family
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec

THETA = 500000.0


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    bias = read.take("attention_bias", False, kind=bool)
    layers = read.integer("num_hidden_layers")
    kinds = [SLIDING if (layer + 1) % 4 else FULL for layer in range(layers)]
    rope, window_rope = _ropes(read)
    spec = ModelSpec(
        family="olmo3",
        norms="after",
        norm_rounds_last=True,
        qk_norm="whole",
        qkv_bias=bias,
        out_bias=bias,
        layers=read.layers(read.window(default=4096), kinds),
        window_rope=window_rope,
        **read.llama_like(rms_norm_eps=1e-5, rope=rope),
    )
    read.finish()
    return spec


def _ropes(read: ConfigReader) -> tuple[Rope, Rope]:
    """Read the ropes of layers without and with a window.

    Published files have the scaling of the first alone, in rope_scaling, and one theta for both.
    """
    by_kind = read.object("rope_parameters")
    if not by_kind:
        return read.rope(THETA), Rope(read.positive("rope_theta", THETA))
    if set(by_kind) != {FULL, SLIDING}:
        raise ModelError(
            f"config.json: rope_parameters have {', '.join(sorted(by_kind))}; they must have "
            f"{FULL} and {SLIDING}"
        )
    return read.rope(THETA, layers=FULL), read.rope(THETA, layers=SLIDING)


FAMILY = Family(spec_from_hf, olmo2.tensors)
