"""The operator's options of an engine, and the tables that they choose from."""

from dataclasses import dataclass
from typing import Literal

from jaxserve.config.option import UNBOUNDED, bounds_of, check_bounds, option
from jaxserve.flag_errors import flag_error

MAX_DECODE_STEPS = 64
PROPOSERS = ("off", "ngram", "draft")
DRAFT_TOKENS = 7  # tokens drafted for a row in a step, unless --draft-tokens says otherwise
MAX_DRAFT_TOKENS = 31
# Name of --kv -> name of the dtype in numpy and ml_dtypes.
PAGE_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
EIGHT_BITS = ("int8", "fp8")
PAGE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}  # of a number, without scales
# A page of 8-bit numbers has as many bytes as one of 64 tokens in bfloat16, and 128 tokens are the
# least that the TPU kernel reads of 8-bit pages.
PAGE_SIZE = 64
PAGE_SIZE_8_BITS = 128
SNAPSHOT_SHARE = 0.2  # of the cache's memory, unless --snapshot-share says otherwise
SNAPSHOT_INTERVAL = 2048  # tokens, to whole pages, unless --snapshot-interval says otherwise
KERNELS = ("reference", "gpu", "tpu")
ATTENTION_KERNELS = ("reference", "cpu", "gpu", "tpu")


@dataclass(frozen=True)
class Preset:
    """Sizes that a value of --prefer stands for."""

    max_batch: int  # rows that run together
    # Most tokens of one step, which is how long a prompt can hold up the other streams.
    step_tokens: int
    # Decode steps in one launch while no other request could join; tokens then arrive in groups of
    # that many.
    decode_steps: int


PRESETS: dict[str, Preset] = {
    "latency": Preset(max_batch=4, step_tokens=128, decode_steps=1),
    "balanced": Preset(max_batch=16, step_tokens=512, decode_steps=1),
    "throughput": Preset(max_batch=64, step_tokens=2048, decode_steps=8),
}


def _by_preset(name: str) -> str:
    """Return the end of a help text: the default of a size under each preset."""
    sizes = ", ".join(f"{key} {getattr(preset, name)}" for key, preset in PRESETS.items())
    return f"default by --prefer: {sizes}"


def _kernel(product: str, names: tuple[str, ...] = KERNELS) -> str:
    """Return the help text of a flag that chooses a kernel."""
    *most, last = names
    return f"kernel for {product}: auto, {', '.join(most)} or {last} (default: auto)"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine; None leaves the choice to the engine.

    Attributes:
        prefer: Preset of the sizes below: "latency", "balanced" or "throughput".
        max_batch: Rows (sequences) that run together in one lane, 1 to 4,096.
        step_tokens: The most tokens that one step computes, at least max_batch.
        decode_steps: Decode steps in one launch while no other request could join, 1 to 64.
        kv: What the pages of the KV cache hold: "float32", "bfloat16", "int8", "fp8", or "auto",
            the dtype of the weights.
        page_size: Tokens in one page. The default is 64, and 128 for 8-bit pages.
        cache_tokens: Capacity of the KV cache of one lane, in tokens. The default is what the
            device's memory has room for.
        max_context: The longest prompt plus output, in tokens. The default is the model's.
        prefix_cache: Keep the pages of finished prompts for requests that begin alike.
        snapshot_share: For models whose layers have a recurrent state: share of the cache's memory
            for snapshots of states, which the prefix cache finds; 0 to 0.9. The default is 0.2.
        snapshot_interval: Tokens between the snapshots of a long prompt, a multiple of page_size.
            The default is about 2,048.
        snapshot_answers: Keep the state behind the last whole page of every sequence, for requests
            that begin with its prompt and its output.
        speculate: How tokens are drafted: "off"; "ngram", by what followed the newest tokens where
            they occurred before; or "draft", by a smaller model.
        draft_tokens: The most tokens drafted for a row in a step, 1 to 31. The default is 7.
        deterministic: Give the same tokens bit for bit whatever else runs, at the price of padding
            and of reserving pages.
        page_exchange: Let other engines read the pages of prompts, and write theirs.
        attention: Attention kernel: "auto", "reference", "cpu", "gpu" or "tpu".
        grouped_matmul: Kernel for products with experts: "auto", "reference", "gpu" or "tpu".
        quantized_matmul: Kernel for products with int4 weights in groups: "auto", "reference",
            "gpu" or "tpu".
        recurrence: Kernel for layers with the gated delta rule: "auto", "reference", "gpu" or
            "tpu".
    """

    prefer: Literal["latency", "balanced", "throughput"] = option(
        "balanced",
        "preset of the engine's sizes: latency answers few streams fast, throughput answers "
        "many (default: balanced)",
        choices=tuple(PRESETS),
    )
    max_batch: int | None = option(
        None,
        f"sequences that run together in one lane ({_by_preset('max_batch')})",
        metavar="N",
        bounds=(1, 4096),
    )
    step_tokens: int | None = option(
        None,
        f"most tokens that one step computes, which is how long a prompt can hold up other "
        f"streams ({_by_preset('step_tokens')})",
        metavar="N",
        bounds=(1, 2**17),
    )
    decode_steps: int | None = option(
        None,
        f"decode steps in one launch while no other request could join "
        f"({_by_preset('decode_steps')}; 1 with --deterministic)",
        metavar="N",
        bounds=(1, MAX_DECODE_STEPS),
    )
    kv: str = option(
        "auto",
        f"dtype of the KV cache: {', '.join(PAGE_DTYPES)}, or auto, the dtype of the weights; "
        f"8 bits have a float32 scale per token and head (default: auto)",
        metavar="DTYPE",
    )
    page_size: int | None = option(
        None,
        f"tokens in one page of the KV cache (default: {PAGE_SIZE}; {PAGE_SIZE_8_BITS} in int8 "
        f"and fp8)",
        metavar="N",
        bounds=(1, 1024),
    )
    cache_tokens: int | None = option(
        None,
        "capacity of one lane's KV cache in tokens (default: every row at full context, or "
        "less if the device's memory has less room)",
        metavar="N",
        bounds=(1, UNBOUNDED),
    )
    max_context: int | None = option(
        None,
        "longest prompt plus output in tokens (default: the model's longest context)",
        metavar="N",
        bounds=(1, UNBOUNDED),
    )
    prefix_cache: bool = option(
        True, "forget the pages of a prompt when its request ends (default: they are kept)"
    )
    snapshot_share: float | None = option(
        None,
        f"share of the KV cache's memory for snapshots of recurrent states, from which requests "
        f"that begin alike go on (default: {SNAPSHOT_SHARE}, where layers have such states)",
        metavar="SHARE",
        bounds=(0, 0.9),
    )
    snapshot_interval: int | None = option(
        None,
        f"tokens between the snapshots of a long prompt, a multiple of --page-size (default: "
        f"{SNAPSHOT_INTERVAL}, to whole pages)",
        metavar="N",
        bounds=(1, UNBOUNDED),
    )
    snapshot_answers: bool = option(
        True,
        "keep no state of what a sequence generates (default: the state behind its last whole page "
        "is kept where there is room, for a conversation's next turn)",
    )
    speculate: str = option(
        "off",
        f"draft several tokens and verify them in one step, where that pays: "
        f"{', '.join(PROPOSERS)} (default: off)",
        metavar="HOW",
    )
    draft_tokens: int | None = option(
        None,
        f"most tokens drafted for a sequence in one step (default: {DRAFT_TOKENS})",
        metavar="N",
        bounds=(1, MAX_DRAFT_TOKENS),
    )
    deterministic: bool = option(
        False, "give the same tokens bit for bit whatever the load (default: off, which is faster)"
    )
    page_exchange: bool = False  # follows from --role
    attention: str = option("auto", _kernel("attention", ATTENTION_KERNELS))
    grouped_matmul: str = option("auto", _kernel("the experts of a mixture"))
    quantized_matmul: str = option("auto", _kernel("weights in int4 groups"))
    recurrence: str = option("auto", _kernel("recurrent states"))


def given_or(options: EngineOptions, name: str, default: int) -> int:
    """Return an option within its bounds, or the default where it was left open."""
    value = getattr(options, name)
    if value is None:
        return default
    check_bounds(name, value, bounds_of(EngineOptions, name))
    return value


def check_draft_model(options: EngineOptions, draft_model: object) -> None:
    """Raise ConfigError unless a draft model is given exactly when --speculate draft is set."""
    if draft_model and options.speculate != "draft":
        raise flag_error(
            "--draft-model", draft_model, "it drafts nothing without --speculate draft"
        )
    if options.speculate == "draft" and not draft_model:
        raise flag_error("--speculate", "draft", "there is no draft model (add --draft-model)")
