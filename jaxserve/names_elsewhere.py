"""Names by which other libraries call what jaxserve has, and the right one for each error.

The left names are those of vLLM, SGLang, transformers, llama-cpp-python and OpenAI's client.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

# A name elsewhere -> what to do here, as the second half of an error's sentence.
Names = Mapping[str, str]

_OPTION = "use options=EngineOptions({}=...)"
_STRUCTURE = "use structure=Structure.of(kind, value)"
_NO_ADAPTERS = "adapters are not built in; merge them into the checkpoint's weights"
_NO_BEAMS = "beam search is not built in; use n, and choose among the completions"

LLM_KEYWORDS: Names = {
    **dict.fromkeys(("model_path", "model_name", "model_id"), "use model, the first argument"),
    "pretrained_model_name_or_path": "use model, the first argument",
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "use tensor"),
    **dict.fromkeys(("data_parallel_size", "dp_size"), "use data"),
    **dict.fromkeys(
        ("enable_expert_parallel", "ep_size"), "use expert, the number of devices of that axis"
    ),
    "pipeline_parallel_size": "pipeline parallelism is not built in; use tensor, expert or data",
    **dict.fromkeys(
        ("max_model_len", "max_seq_len", "max_seq_length", "context_length", "n_ctx"),
        "use max_context",
    ),
    **dict.fromkeys(
        ("gpu_memory_utilization", "mem_fraction_static"),
        f"{_OPTION.format('cache_tokens')}; the default is what the devices have room for",
    ),
    "kv_cache_dtype": _OPTION.format("kv"),
    "block_size": _OPTION.format("page_size"),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), _OPTION.format("max_batch")),
    **dict.fromkeys(
        ("max_num_batched_tokens", "chunked_prefill_size"), _OPTION.format("step_tokens")
    ),
    "enable_chunked_prefill": (
        f"leave it out; long prompts always run in chunks ({_OPTION.format('step_tokens')})"
    ),
    **dict.fromkeys(
        ("enable_prefix_caching", "disable_radix_cache"), _OPTION.format("prefix_cache")
    ),
    **dict.fromkeys(
        ("speculative_config", "speculative_model", "num_speculative_tokens"),
        'use draft_model with options=EngineOptions(speculate="draft", draft_tokens=...)',
    ),
    "quantization": "use weights; leave it out for a checkpoint that is quantized already",
    "load_in_8bit": 'use weights="int8"',
    "load_in_4bit": 'use weights="int4"',
    "torch_dtype": "use dtype",
    **dict.fromkeys(("device", "device_map"), 'use devices, such as jax.devices("cpu")'),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_path", "tokenizer_mode"),
        "leave it out; the tokenizer is the one in the checkpoint's folder",
    ),
    "trust_remote_code": "leave it out; the code of a checkpoint is never run",
    "enforce_eager": "leave it out; every step is compiled",
    "enable_lora": _NO_ADAPTERS,
    "random_seed": "use seed in SamplingParams",
}

# Fields of SamplingParams, and keywords of the calls that take these fields.
SAMPLING_KEYWORDS: Names = {
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "max_output_tokens"), "use max_tokens"
    ),
    "max_length": "use max_tokens, which counts the output alone",
    "min_new_tokens": "use min_tokens",
    "do_sample": "use temperature; 0 is greedy decoding",
    "num_return_sequences": "use n",
    **dict.fromkeys(("num_beams", "use_beam_search", "best_of", "length_penalty"), _NO_BEAMS),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "use stop"),
    "eos_token_id": "use stop_token_ids",
    "include_stop_str_in_output": "use include_stop",
    "skip_special_tokens": "leave it out; the text has no special tokens, token_ids has all",
    "top_logprobs": "use logprobs, the number of alternatives",
    **dict.fromkeys(("random_seed", "sampling_seed"), "use seed"),
    "repeat_penalty": "use repetition_penalty",
    **dict.fromkeys(
        (
            *("guided_decoding", "structured_outputs", "response_format", "json_schema"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
        ),
        _STRUCTURE,
    ),
    "logits_processors": (
        "functions of the logits are not built in; use logit_bias, allowed_token_ids or structure"
    ),
    "sampling_params": "use params",
    "stream": "use the method stream",
    "use_tqdm": "use progress=False where the LLM is made",
    **dict.fromkeys(("prompt_token_ids", "input_ids"), "token ids are given as prompts"),
    "attention_mask": "leave it out; prompts are never padded",
    "lora_request": _NO_ADAPTERS,
    "tools": "a server takes calls apart: jaxserve serve, and chat of jaxserve.client",
    "add_generation_prompt": "leave it out; the prompt ends where the answer begins",
}

LLM_ATTRIBUTES: Names = {
    **dict.fromkeys(("tokenizer", "get_tokenizer"), "use model.tokenizer"),
    "encode": "use embed, or model.tokenizer.encode",
    "shutdown": "use close",
    "llm_engine": "use engine",
    "beam_search": _NO_BEAMS,
    "create_completion": "use generate",
    "create_chat_completion": "use chat",
    "apply_chat_template": "use chat; the prompt of its completions is what the template renders",
    "score": "use generate with prompt_logprobs=0",
    **dict.fromkeys(("async_generate", "generate_async"), "use AsyncLLM and its generate"),
}

COMPLETION_ATTRIBUTES: Names = {
    **dict.fromkeys(
        ("outputs", "choices"), "every choice is a completion of its own; use text or token_ids"
    ),
    **dict.fromkeys(("message", "content", "generated_text", "output_text"), "use text"),
    "tokens": "use token_ids",
    "usage": "use len(prompt_token_ids) and len(token_ids)",
    "cumulative_logprob": "use sum(entry.logprob for entry in logprobs)",
    "metrics": "use timings",
    "stop_reason": "use stopped_by",
}

PACKAGE_NAMES: Names = {
    **dict.fromkeys(("AsyncLLMEngine", "AsyncEngineArgs"), "use AsyncLLM"),
    **dict.fromkeys(("Engine", "LLMEngine", "EngineArgs"), "use LLM"),
    "Llama": "use LLM",
    **dict.fromkeys(("Client", "AsyncClient"), "import it from jaxserve.client"),
    "OpenAI": (
        "start jaxserve serve, and use OpenAI's own client with "
        'base_url="http://127.0.0.1:8000/v1"'
    ),
    **dict.fromkeys(
        ("pipeline", "AutoModel", "AutoModelForCausalLM"), "use LLM(folder).generate(prompts)"
    ),
    "AutoTokenizer": "use LLM(folder).model.tokenizer",
    "GenerationConfig": "use SamplingParams",
    **dict.fromkeys(
        ("GuidedDecodingParams", "StructuredOutputsParams"),
        "use SamplingParams(structure=Structure.of(kind, value))",
    ),
    **dict.fromkeys(("RequestOutput", "CompletionOutput"), "use Completion"),
    "PoolingParams": "use LLM(folder).embed(prompts)",
    "LoRARequest": _NO_ADAPTERS,
}


def explains_names[C: type](
    keywords: Names = MappingProxyType({}), attributes: Names = MappingProxyType({})
) -> Callable[[C], C]:
    """Return a decorator of a class whose errors about unknown names say which name is right.

    Args:
        keywords: Names that are no keywords of the constructor, with what to use.
        attributes: Names that are no attributes of the objects, with what to use.

    Returns:
        The decorator. The class raises TypeError for a keyword and AttributeError for an attribute
        that it does not have, as any class does.
    """

    def decorate(cls: C) -> C:
        if keywords:
            cls.__init__ = _explained_init(cls.__name__, cls.__init__, keywords)
        if attributes:
            cls.__getattr__ = _explained_getattr(cls.__name__, attributes)
        return cls

    return decorate


def _explained_init(owner: str, init: Callable[..., None], names: Names) -> Callable[..., None]:
    known = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def explained(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise TypeError(f"{owner} has no keyword {name!r}{_advice(name, names, known)}")
        init(self, *args, **given)

    return explained


def _explained_getattr(owner: str, names: Names) -> Callable[[Any, str], Any]:
    def explained(self: Any, name: str) -> Any:
        if name not in names:
            # Python's own error; or that of a property, which has led here.
            return object.__getattribute__(self, name)
        problem = f"{owner} has no attribute {name!r}{_advice(name, names)}"
        raise AttributeError(problem, name=name, obj=self)

    return explained


def _advice(name: str, names: Names, known: tuple[str, ...] = ()) -> str:
    """Return the end of an error about `name`; empty where nothing is known of it."""
    if name in names:
        return f": {names[name]}"
    near = get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ""
