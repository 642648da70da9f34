"""Fields of the files beside a tokenizer: each is used, without effect, or an error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jaxserve.tokenizer.protocol import TokenizerError

# Standard fields of transformers, in the order in which their tokens get ids.
NAMES: Final = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
LISTS: Final = (
    *("additional_special_tokens", "extra_special_tokens"),
    "model_specific_special_tokens",
)
USED: Final = frozenset(
    """
    added_tokens_decoder add_bos_token add_eos_token add_prefix_space legacy tokenizer_class
    chat_template chat_control_tokens
    """.split()
)
# Fields that change no token of a prompt and no text of an answer here. Padding and truncation are
# never done; the rest is bookkeeping, or belongs to decoders and programs of transformers.
WITHOUT_EFFECT: Final = frozenset(
    """
    model_max_length max_len max_length max_tokens padding_side truncation_side truncation_strategy
    stride pad_to_multiple_of pad_token_type_id padding truncation model_input_names
    return_token_type_ids clean_up_tokenization_spaces spaces_between_special_tokens
    clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    decode_with_prefix_space errors name_or_path _name_or_path processor_class auto_map use_fast
    is_fast is_local local_files_only from_slow trust_remote_code backend files_loaded _commit_hash
    tokenizer_file vocab_file merges_file special_tokens_map_file tokenizer_type init_inputs
    vocab_size n_words sp_model_kwargs use_default_system_prompt response_template response_schema
    device verbose transformers_version image_seq_length chat_template_file
    keep_accents remove_space strip_accents tokenize_chinese_chars never_split trim_offsets
    do_basic_tokenize separate_vocabs src_lang tgt_lang language extra_ids fast suffix_first
    model_type max_seq_length max_position_embeddings deprecation_warnings torch_dtype dtype
    cache_dir use_cache return_tensors tokenizer_version image_size wordpieces_prefix token
    hf_token use_auth_token
    """.split()
)
# Fields that would change tokens, with the values that change none.
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "split_special_tokens": (False, None),
    "encode_special_tokens": (False, None),
    "fix_mistral_regex": (False, None),
    "do_lower_case": (False, None),
    "add_special_tokens": (True, None),
}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no file.

    Raises:
        TokenizerError: The file is there and holds no JSON object.
    """
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path}: not readable as JSON ({error}); copy the file again"
        ) from None
    if not isinstance(content, dict):
        raise TokenizerError(
            f"{path}: holds {type(content).__name__} where an object is expected; copy the file "
            f"again"
        )
    return content


def check_fields(path: Path, fields: Mapping[str, Any], used: frozenset[str]) -> None:
    """Raise TokenizerError for a field that is neither used nor known to be without effect."""
    for name, value in fields.items():
        if name in used or name in LISTS or name in WITHOUT_EFFECT:
            continue
        if name.endswith("_token_id"):
            continue
        if name.endswith("_token") and not name.startswith("add_"):
            _check_token(path, name, value)  # models with pictures have names of their own
            continue
        if name not in UNSUPPORTED:
            raise TokenizerError(
                f"{path}: the field {name} is not understood, and could change the tokens; remove "
                f"it if it does not count"
            )
        if value not in UNSUPPORTED[name]:
            raise TokenizerError(
                f"{path}: {name} = {value!r} is not supported; remove it if the tokenizer's own "
                f"file does what it asks for"
            )


def names_token(name: str, value: Any) -> bool:
    """Return whether a field names a token: eos_token, or one of its own such as image_token.

    An empty string names none, as null.
    """
    is_token = name.endswith("_token") and name not in WITHOUT_EFFECT
    return is_token and isinstance(value, str | dict) and value != ""


def _check_token(path: Path, name: str, value: Any) -> None:
    """Raise TokenizerError for a field that names no token, and is not switched on or off."""
    if value is None or isinstance(value, str | dict):
        return
    if name in NAMES or not isinstance(value, bool):
        raise TokenizerError(
            f"{path}: {name} is {value!r:.80}; expected a string that names a token, or an object "
            f'{{"content": string}}'
        )


def flag(path: Path, fields: Mapping[str, Any], name: str) -> bool | None:
    """Return a field that is true, false, null or absent; raise TokenizerError for another."""
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise TokenizerError(f"{path}: {name} is {value!r}; expected true, false or null")
