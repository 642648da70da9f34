"""Fields of other APIs that have no effect here, another name, or only their usual values."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Fields that have no effect here, each with the reason.
IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "user": "who asks: nothing here counts or bills by person",
        "safety_identifier": "who asks, as a hash: nothing here counts or bills by person",
        "metadata": "labels of a stored completion: nothing is stored",
        "prompt_cache_key": "a hint about which prompts share a beginning: the cache finds that "
        "out (cache_salt separates)",
        "prompt_cache_options": "how to cache prompts: pages are shared whenever they can be",
        "prompt_cache_retention": "how long prompts stay cached: as long as there is room",
        "service_tier": "how fast the answer shall be: `priority` says that here",
        "store": "whether OpenAI keeps the answer: nothing is stored",
        "prediction": "a text that the answer may resemble: drafts come from elsewhere here",
    }
)

# Fields by which other servers know what has another name here.
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), "response_format"),
        **dict.fromkeys(("guided_grammar", "structured_outputs"), "response_format"),
        **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar"), "response_format"),
        **dict.fromkeys(("format", "structural_tag"), "response_format"),
        **dict.fromkeys(("max_new_tokens", "max_output_tokens"), "max_tokens"),
        **dict.fromkeys(("max_length", "n_predict", "num_predict"), "max_tokens"),
        **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
        **dict.fromkeys(("stop_sequences", "stop_words"), "stop"),
        "repeat_penalty": "repetition_penalty",
        **dict.fromkeys(("random_seed", "sampling_seed"), "seed"),
        "do_sample": "temperature",
        "num_return_sequences": "n",
        "no_stop_trim": "include_stop_str_in_output",
        "return_logprob": "logprobs",
        "top_logprobs_num": "top_logprobs",
        "logprob_start_len": "prompt_logprobs",
        "rid": "request_id",
        **dict.fromkeys(("thinking_token_budget", "max_thinking_tokens"), "thinking_budget"),
        "system": "messages",
    }
)

# Fields of which only the values that ask for the usual behaviour are accepted, and null.
ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # without tools, either value changes nothing
        "reasoning_effort": ("none",),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
