"""Fields of OpenAI's API that are accepted though nothing here heeds them, each with its reason.

Every other field that is not in the request models is an error: nothing is dropped in silence.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "user": "who asks: nothing here counts or bills by person",
        "safety_identifier": "the same",
        "metadata": "labels of a stored completion: nothing is stored",
        "prompt_cache_key": "a hint about which prompts share a beginning: the cache finds that "
        "out (cache_salt parts)",
        "prompt_cache_options": "how to cache prompts: pages are shared whenever they can be",
        "prompt_cache_retention": "how long prompts stay cached: as long as there is room",
    }
)

# Values that ask for what happens anyway; any other is refused. Without a value: only null is
# accepted.
ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # of no tools
        "prediction": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "suffix": ("",),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
)
