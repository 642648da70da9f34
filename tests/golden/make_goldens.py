"""Write the golden answers of Hugging Face transformers that the decoder tests compare with.

Needs its own environment, Python 3.11: `pip install torch==2.13.0 transformers safetensors
sentencepiece accelerate` (accelerate: to load quantized models). Then `python
tests/golden/make_goldens.py [--babyllama DIR]` rewrites, beside this file:

- `<case>/config.json`, `<case>/model.safetensors`: a tiny random float32 model, as transformers
  saves it (the cases named `legacy` have a config.json in the form of published checkpoints:
  rope_theta and rope_scaling at the top; those named `fp8` and `mxfp4` also have quantized weights
  as published, and the answers are those of the float32 model that the weights stand for);
- `<case>/golden.npz`: `prompts` int32 [B, P]; `tokens` int32 [B, S], the greedy continuation, blind
  to eos; `prompt_logits` float32 [B, P, V]; `decode_logits` float32 [B, S, V], where
  decode_logits[:, i] is the answer to feeding tokens[:, i] at position P + i. So tokens[:, 0] is
  the argmax of prompt_logits[:, -1], and tokens[:, i + 1] that of decode_logits[:, i]. B = 2, P =
  24, S = 32, V = 96; one prefill, then S cached decode steps. If M of the layers have X experts per
  token: `experts` int32 [M, B, P + S, X], their ids, the largest weight first, and `expert_weights`
  float32, the same shape: what each expert's output is multiplied with, all told;
- `qwen3_embedding/`: the same of an embedding model, with the files of sentence-transformers; its
  golden.npz also has `embeddings` float32 [B, D], of length 1: the last final hidden state of the
  first `lengths` int32 [B] of prompts;
- `gemma3_images/` and the like: another case's model with a vision tower (text_parts.py), whose
  golden.npz is that case's: the whole model was asked again;
- `rope.json`: name -> {config, inv_freq [head_dim / 2], attention_scaling}, at the figures of
  published models;
- `babyllama_greedy.json`, if DIR holds the BabyLlama checkpoint: 200 greedy tokens after [1], blind
  to eos, and gaps[i], the distance between the two largest of the logits that chose tokens[i].

Before a case is written it is proved to be a test: its choices of tokens and experts stand clear of
ties, and each norm weight, bias, epsilon, RoPE and routing figure moves its logits. Afterwards the
folder is loaded again and must give the same answers.
"""

import argparse
import copy
import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from altered_configs import altered_configs
from embedding_golden import (
    embed,
    embedding_answer,
    embedding_case,
    load_encoder,
    sentence_transformers_files,
    wrong_embeddings,
)
from golden_cases import Case, all_cases, published_ropes
from moe_cases import moe_cases
from moe_routing import chosen_experts, recorded, smallest_gap
from safetensors.torch import load_file, save_file  # pyright: ignore[reportMissingImports]
from state_cases import state_cases
from stored_weights import Stored, Tensors
from text_parts import text_parts, write_text_part
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # pyright: ignore[reportMissingImports]

EAGER = dict(dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
B, P, S = 2, 24, 32
LOGIT_STD = 2.0
SMALLEST_GAP = 5e-3  # of the two largest logits at any greedy step; float32 noise is about 1e-5
SMALLEST_CHOICE = 1e-4  # between the scores of the last expert chosen and the first that was not
SMALLEST_EFFECT = 0.05  # on the logits, of a number that a case is there to test
SAME = 5e-5  # largest difference between one pass over the sequence and cached steps, in float32


def build(config: PretrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, **EAGER).eval()


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **EAGER).eval()


def norm_offset(config: PretrainedConfig, name: str) -> float:
    """What a norm adds to its weight: Gemma multiplies by 1 + weight.

    So does Qwen3-Next, except for the norm behind a recurrent state.
    """
    if name.endswith("linear_attn.norm.weight"):
        return 0.0
    return 1.0 if config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5")) else 0.0


def spread(model: PreTrainedModel, name: str, weight: torch.Tensor) -> float:
    """The standard deviation of a matrix [out, in] or [E, out, in], a bias, or sinks [N].

    That of matrices keeps activations near 1.5, but for gpt-oss's [E, in, out], whose gates must
    reach their limit.
    """
    if name.endswith("sinks"):
        return 1.5
    if name.endswith("bias"):
        return bias_spread(model.config.model_type, name)
    if model.config.model_type == "gpt_oss" and "experts" in name:
        return (4.0 if "gate_up" in name else 1.0) / math.sqrt(weight.shape[1])
    return 1.5 / math.sqrt(weight.shape[-1])


def bias_spread(model_type: str, name: str) -> float:
    """The standard deviation of a bias.

    OLMo normalizes queries and keys, and what attention adds: large biases of these would leave
    nothing of the rest.
    """
    if not model_type.startswith("olmo"):
        return 0.3
    return 1.0 if name.endswith(("q_proj.bias", "k_proj.bias")) else 0.05


def latent_rank(config: PretrainedConfig, name: str) -> int:
    """How many outputs of the projection DeepSeek normalizes; the rest of kv_a_proj_with_mqa are
    keys for RoPE.
    """
    return config.kv_lora_rank if "kv_a_proj" in name else config.q_lora_rank


def weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that is saved, tied weights once: also the bias of DeepSeek-V3's choices, which is
    no parameter.
    """
    yield from model.named_parameters()
    yield from (
        (name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()
    )


@torch.no_grad()
def randomize(model: PreTrainedModel, prompts: torch.Tensor, generator: torch.Generator) -> None:
    """Random weights, the final norm scaled so that logits have LOGIT_STD."""
    for name, weight in weights(model):
        if name.endswith("norm.weight"):
            offset = norm_offset(model.config, name)
            weight.uniform_(0.5 - offset, 1.5 - offset, generator=generator)
        elif name.endswith("A_log"):  # most of a state lasts for many tokens
            weight.uniform_(0.02, 0.5, generator=generator).log_()
        elif "embed_tokens" in name:
            weight.normal_(
                0.0, 0.02, generator=generator
            )  # small, as when published: the epsilon of the norms shows
        else:
            weight.normal_(0.0, spread(model, name, weight), generator=generator)
        if "a_proj" in name:
            weight[: latent_rank(model.config, name)] *= (
                0.01  # small latents: the epsilon of their norms shows too
            )
    last = "embedding_norm" if model.config.model_type.startswith("lfm2") else "norm"
    norm = model.model.get_submodule(last).weight
    offset = norm_offset(model.config, "norm.weight")
    norm.copy_((norm + offset) * LOGIT_STD / model(prompts).logits.std() - offset)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: torch.Tensor, steps: int) -> Tensors:
    """One prefill of prompts [B, P] and `steps` cached decode steps: the arrays of golden.npz."""
    out = model(prompts, use_cache=True)
    prompt_logits, tokens, logits = out.logits, [], []
    for _ in range(steps):
        tokens.append(out.logits[:, -1:].argmax(-1))
        out = model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    answers = dict(
        tokens=torch.cat(tokens, 1), prompt_logits=prompt_logits, decode_logits=torch.cat(logits, 1)
    )
    return dict(prompts=prompts, **answers)


def answer(model: PreTrainedModel, prompts: torch.Tensor) -> tuple[Tensors, float]:
    """The arrays of golden.npz, those of the experts included, and the smallest gap of a choice of
    experts.
    """
    with recorded(model) as routings:
        golden = greedy(model, prompts, S)
    return {**golden, **chosen_experts(routings, len(prompts))}, smallest_gap(routings)


def top_two_gaps(golden: Tensors) -> torch.Tensor:
    """[B, S]: by how much tokens[b, i] was chosen."""
    deciding = torch.cat([golden["prompt_logits"][:, -1:], golden["decode_logits"][:, :-1]], 1)
    largest = deciding.topk(2, dim=-1).values
    return largest[..., 0] - largest[..., 1]


@torch.no_grad()
def one_pass(model: PreTrainedModel, golden: Tensors) -> torch.Tensor:
    """Logits [B, P + S, V] of the whole sequence, no cache."""
    return model(torch.cat([golden["prompts"], golden["tokens"]], 1), use_cache=False).logits


def rounding(model: PreTrainedModel, golden: Tensors) -> float:
    """How far one pass over the sequence is from cached steps at most."""
    cached = torch.cat([golden["prompt_logits"], golden["decode_logits"]], 1)
    return (one_pass(model, golden) - cached).abs().max().item()


def neutral(config: PretrainedConfig, name: str) -> float:
    """What a norm weight, a sink, a bias or a gate is where it is forgotten."""
    if name.endswith("norm.weight"):
        return 1.0 - norm_offset(config, name)
    return -math.inf if name.endswith("sinks") else 0.0


def altered_models(model: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """The model with one number wrong at a time: a figure of the config, a norm forgotten, a bias
    forgotten.
    """
    for name, config in altered_configs(model.config):
        altered = build(config)
        altered.load_state_dict(model.state_dict())
        yield name, altered
    for name, _ in weights(model):
        if ".indexer." in name:  # it chooses all tokens, whatever its weights
            continue
        if name.endswith(("norm.weight", "bias", "shared_expert_gate.weight", "sinks", "A_log")):
            altered = copy.deepcopy(model)
            torch.nn.init.constant_(altered.state_dict()[name], neutral(model.config, name))
            yield name, altered
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):
            altered = copy.deepcopy(model)
            altered.get_submodule(name).variance_epsilon = 10 * module.variance_epsilon
            yield f"{name} epsilon", altered


def smallest_effect(model: PreTrainedModel, golden: Tensors) -> tuple[float, str]:
    """How far the logits move at least when one number is wrong, and which number that is."""
    right = one_pass(model, golden)
    moves = [
        ((one_pass(altered, golden) - right).abs().max().item(), name)
        for name, altered in altered_models(model)
    ]
    if min(moves)[0] < SMALLEST_EFFECT:
        raise SystemExit(
            f"{min(moves)[1]} moves the logits by {min(moves)[0]:.1e}, less than "
            f"{SMALLEST_EFFECT:.1e}"
        )
    return min(moves)


def save_tensors(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_decoded(folder: Path, stored: Stored) -> PreTrainedModel:
    """The float32 model that the folder's tensors stand for."""
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as decoded:
        write_json(Path(decoded, "config.json"), fields)
        save_tensors(stored.decode(load_file(folder / "model.safetensors")), Path(decoded))
        return load(Path(decoded))


def as_stored(model: PreTrainedModel, stored: Stored) -> tuple[PreTrainedModel, Tensors]:
    """The tensors to store for a model, and the float32 model that they stand for."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = stored.encode(load_file(Path(folder, "model.safetensors")))
        save_tensors(tensors, Path(folder))
        return load_decoded(Path(folder), stored), tensors


def random_model(case: Case, seed: int) -> tuple[PreTrainedModel, Tensors | None, torch.Tensor]:
    """A model, its tensors if they are not stored as transformers does, and prompts [B, P]."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, case.config.vocab_size, (B, P), generator=generator)
    model = build(case.config)
    randomize(model, prompts, generator)
    model, tensors = as_stored(model, case.stored) if case.stored else (model, None)
    return model, tensors, prompts


def clear_model(
    case: Case, first_seed: int
) -> tuple[PreTrainedModel, Tensors | None, Tensors, int]:
    """The first random model whose choices of tokens and experts stand clear of ties, its tensors,
    answers and seed.

    Models that make more of rounding than the case allows are passed over too.
    """
    for seed in itertools.count(first_seed):
        model, tensors, prompts = random_model(case, seed)
        golden, choice_gap = answer(model, prompts)
        clear = top_two_gaps(golden).min() > SMALLEST_GAP and choice_gap > SMALLEST_CHOICE
        if clear and rounding(model, golden) <= case.rounding:
            return model, tensors, golden, seed
    raise AssertionError("unreachable: itertools.count has no end")


def legacy_config(written: dict[str, Any], form: str) -> dict[str, Any]:
    """A config.json of transformers 5 in the form of published checkpoints."""
    newer = {"rope_parameters", "dtype", "layer_types", "transformers_version"}
    fields = {key: value for key, value in written.items() if key not in newer}
    fields["torch_dtype"] = written["dtype"]
    if form == "minimal":
        late = {
            "head_dim",
            "num_key_value_heads",
            "attention_bias",
            "attention_dropout",
            "mlp_bias",
            "pretraining_tp",
        }
        return {key: value for key, value in sorted(fields.items()) if key not in late}
    figures = dict(written["rope_parameters"])
    if form == "gemma3":
        local, whole = figures["sliding_attention"], dict(figures["full_attention"])
        pattern = written["layer_types"].index("full_attention") + 1
        fields |= dict(rope_local_base_freq=local["rope_theta"], sliding_window_pattern=pattern)
        fields |= dict(rope_theta=whole.pop("rope_theta"), rope_scaling=whole)
        return {key: value for key, value in sorted(fields.items()) if not key.startswith("_")}
    if form == "olmo3":
        whole = dict(figures["full_attention"])
        fields |= dict(layer_types=written["layer_types"], rope_theta=whole.pop("rope_theta"))
        return dict(sorted((fields | dict(rope_scaling=whole)).items()))
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if (
            written["model_type"] in ("phi3", "glm", "glm4", "glm4_moe", "qwen3_next")
            and name in figures
        ):
            fields[name] = figures.pop(name)
    fields["rope_theta"] = figures.pop("rope_theta")
    kind = figures.pop("rope_type")
    fields["rope_scaling"] = None if kind == "default" else {form: kind, **figures}
    return dict(sorted(fields.items()))


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_case(
    case: Case, folder: Path, model: PreTrainedModel, tensors: Tensors | None, golden: Tensors
) -> None:
    model.save_pretrained(folder)
    if tensors:
        save_tensors(tensors, folder)
    (folder / "generation_config.json").unlink()
    if case.legacy or case.published:
        config_path = folder / "config.json"
        fields = json.loads(config_path.read_text())
        fields = (legacy_config(fields, case.legacy) if case.legacy else fields) | case.published
        write_json(
            config_path,
            {name: fields[name] for name in sorted(fields) if name not in case.unpublished.split()},
        )
    arrays = {name: array.numpy() for name, array in golden.items()}
    integers = {
        name: array.astype(np.int32) for name, array in arrays.items() if array.dtype == np.int64
    }
    np.savez_compressed(folder / "golden.npz", **{**arrays, **integers})


def check_reload(case: Case, folder: Path) -> float:
    """The folder alone must give its answers again, but for float32 rounding: where its memory lies
    changes the order of sums. Returned is the noise of one pass without a cache.
    """
    model = (
        load_decoded(folder, case.stored) if case.stored and not case.stored.loads else load(folder)
    )
    golden = {
        name: torch.from_numpy(array) for name, array in np.load(folder / "golden.npz").items()
    }
    again, _ = answer(model, golden["prompts"].long())
    different = [
        name
        for name in again
        if (again[name].to(golden[name].dtype) - golden[name]).abs().max().item() > SAME
    ]
    noise = rounding(model, golden)
    if different or noise > SAME:
        raise SystemExit(
            f"{folder.name}: loaded again, differs in {different}; one pass differs by {noise:.1e}"
        )
    return noise


def make_case(case: Case, folder: Path, first_seed: int) -> None:
    model, tensors, golden, seed = clear_model(case, first_seed)
    effect, number = smallest_effect(model, golden)
    write_case(case, folder, model, tensors, golden)
    noise, gap = check_reload(case, folder), top_two_gaps(golden).min().item()
    print(
        f"{case.name:30} seed {seed}, gap {gap:.0e}, one pass {noise:.0e}, smallest effect "
        f"{effect:.0e} ({number})"
    )


def make_embedding(case: Case, folder: Path, first_seed: int) -> None:
    model, tensors, golden, seed = clear_model(case, first_seed)
    golden |= embedding_answer(model.model, golden["prompts"])
    mistakes = wrong_embeddings(model.model, golden)
    effect, mistake = min(
        ((wrong - golden["embeddings"]).abs().max().item(), name) for name, wrong in mistakes
    )
    if effect < SMALLEST_EFFECT:
        raise SystemExit(f"{case.name}: {mistake} changes the embeddings by {effect:.1e} alone")
    write_case(case, folder, model, tensors, golden)
    for path, content in sentence_transformers_files(case.config.hidden_size).items():
        (folder / path).parent.mkdir(exist_ok=True)
        write_json(folder / path, content)
    noise = check_reload(case, folder)
    if not torch.equal(
        embed(load_encoder(folder), golden["prompts"], golden["lengths"]), golden["embeddings"]
    ):
        raise SystemExit(f"{case.name}: loaded again, embeds differently")
    print(
        f"{case.name:30} seed {seed}, one pass {noise:.0e}, smallest effect {effect:.0e} "
        f"({mistake})"
    )


def rope_answer(config: LlamaConfig) -> dict[str, Any]:
    rotary = LlamaRotaryEmbedding(config)
    sizes = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    figures = {
        **{name: getattr(config, name) for name in sizes},
        "rope_parameters": config.rope_parameters,
    }
    return dict(
        config=figures,
        inv_freq=rotary.inv_freq.tolist(),
        attention_scaling=rotary.attention_scaling,
    )


def babyllama_answer(folder: Path, steps: int) -> dict[str, Any]:
    golden = greedy(load(folder), torch.tensor([[1]]), steps)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    versions = dict(transformers=transformers.__version__, torch=str(torch.__version__))
    answer = dict(
        prompt=[1], tokens=golden["tokens"][0].tolist(), gaps=top_two_gaps(golden)[0].tolist()
    )
    return dict(model_sha256=digest, versions=versions, **answer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the golden answers of Hugging Face transformers."
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where (default: beside this file)"
    )
    parser.add_argument(
        "--babyllama", type=Path, metavar="DIR", help="a checkpoint in Hugging Face layout"
    )
    parser.add_argument(
        "--only", default="", metavar="NAME", help="only the cases whose names begin with this"
    )
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    numbered = (
        *(enumerate(all_cases()), enumerate(moe_cases(), start=1000)),
        enumerate(state_cases(), start=2500),
    )
    for index, case in itertools.chain(*numbered):
        if case.name.startswith(args.only):
            make_case(case, args.out / case.name, first_seed=1000 * index)
    for part in text_parts():
        if part.name.startswith(args.only):
            write_text_part(part, args.out / part.name, args.out)
    embedding = embedding_case()
    if embedding.name.startswith(args.only):
        make_embedding(embedding, args.out / embedding.name, first_seed=2_000_000)
    if args.only:
        return
    write_json(
        args.out / "rope.json",
        {name: rope_answer(config) for name, config in published_ropes().items()},
    )
    if args.babyllama:
        write_json(args.out / "babyllama_greedy.json", babyllama_answer(args.babyllama, steps=200))


if __name__ == "__main__":
    main()
