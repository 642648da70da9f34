"""Reads the files beside a tokenizer, and accounts for every field of theirs.

The files are tokenizer_config.json, special_tokens_map.json and added_tokens.json. They declare
tokens as transformers 5 reads them: added_tokens_decoder of tokenizer_config.json stands for all of
them, and only without it the two older files count.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.tokenizer.declared import DeclaredToken, token_of, tokens_by_name, tokens_with_ids
from jaxserve.tokenizer.protocol import TokenizerError

SETTINGS_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
COMPANION_FILES = (SETTINGS_FILE, MAP_FILE, ADDED_FILE)

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
USED = frozenset(
    """
    added_tokens_decoder add_bos_token add_eos_token add_prefix_space legacy tokenizer_class
    chat_template chat_control_tokens
    """.split()
)
# Fields that change no token of a prompt and no text of an answer here. Padding and truncation are
# never done; the rest is bookkeeping, or belongs to decoders and programs of transformers.
WITHOUT_EFFECT = frozenset(
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
    do_basic_tokenize separate_vocabs src_lang tgt_lang language extra_ids
    """.split()
)
# Fields that would change tokens, with the values that change none.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "split_special_tokens": (False, None),
    "encode_special_tokens": (False, None),
    "fix_mistral_regex": (False, None),
    "do_lower_case": (False, None),
    "add_special_tokens": (True, None),
}
# Classes of transformers that take tokenizer.json as it is.
GENERIC_CLASSES = frozenset(("PreTrainedTokenizerFast", "TokenizersBackend", None))


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings in the files beside a tokenizer; None where they leave it to the tokenizer.

    names: fields such as eos_token, with the names of their tokens, which are special. declared:
    tokens with ids, in the order of the ids. listed: tokens that a file names without an id, those
    of `names` first. overrides: declared tokens count before tokens that tokenizer.json has at
    those ids. unused: tokens of
    added_tokens.json that do not count. add_prefix_space: text gets a space before it; not set
    where transformers, too, leaves it to tokenizer.json. legacy: in a SentencePiece model, text
    after a special token gets a dummy space too. chat_template: as the file has it.
    control_tokens: names of tokens that are a chat template's and that no client may write.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    declared: tuple[DeclaredToken, ...] = ()
    listed: tuple[DeclaredToken, ...] = ()
    overrides: bool = False
    unused: tuple[DeclaredToken, ...] = ()
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    generic: bool = True
    chat_template: Any = None
    control_tokens: frozenset[str] = frozenset()

    @property
    def bos_token(self) -> str | None:
        return self.names.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.names.get("eos_token")


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the files beside the tokenizer of a checkpoint folder; none of them has to be there.

    Raises:
        TokenizerError: A file is not JSON, a field has another type than Hugging Face writes, or a
            field is not understood.
    """
    path = folder / SETTINGS_FILE
    map_path = folder / MAP_FILE
    added_path = folder / ADDED_FILE
    config = read_object(path)
    old_map = read_object(map_path)
    added = read_object(added_path)
    _check_fields(path, config, USED)
    _check_fields(map_path, old_map, frozenset())
    named = _named(path, config)
    listed = _listed(path, config)
    old_named = _named(map_path, old_map)
    overrides = config.get("added_tokens_decoder") is not None
    unused: tuple[DeclaredToken, ...] = ()
    if overrides:
        declared = tokens_with_ids(path, "added_tokens_decoder", config["added_tokens_decoder"])
        unused = tokens_by_name(added_path, added)
    else:
        declared = tokens_by_name(added_path, added, _kept_as_written(config, old_map))
        named = _in_order(named | old_named)
        listed |= _listed(map_path, old_map)
        declared = _special_among(declared, [t.name for t in listed.values() if t.special])
    names = {name: token.name for name, token in named.items()}
    if "eos_token" in old_named:  # something has to end an answer
        names.setdefault("eos_token", old_named["eos_token"].name)
    return TokenizerSettings(
        names=names,
        declared=_special_among(declared, names.values()),
        listed=(*(token.as_special() for token in named.values()), *listed.values()),
        overrides=overrides,
        unused=unused,
        add_bos_token=_flag(path, config, "add_bos_token"),
        add_eos_token=_flag(path, config, "add_eos_token"),
        add_prefix_space=_flag(path, config, "add_prefix_space"),
        legacy=_flag(path, config, "legacy"),
        generic=config.get("tokenizer_class") in GENERIC_CLASSES,
        chat_template=config.get("chat_template"),
        control_tokens=_control_tokens(path, config),
    )


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no file.

    Raises:
        TokenizerError: The file is there and holds no JSON object.
    """
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path}: not readable as JSON ({error}); copy the file again"
        ) from None
    if not isinstance(content, dict):
        raise TokenizerError(
            f"{path}: holds {type(content).__name__} where an object is expected; copy the file "
            f"again"
        )
    return content


def affix(
    flag: bool | None, token_id: int | None, default: tuple[int, ...], name: str
) -> tuple[int, ...]:
    """Return the ids to add at one end of a text: the default where the flag is not set.

    Raises:
        TokenizerError: The flag called `name` asks for a token that the tokenizer does not have.
    """
    if flag is None:
        return default
    if flag and token_id is None:
        token = name.removeprefix("add_")
        raise TokenizerError(
            f"{SETTINGS_FILE}: {name} is true, but no {token} is known; name it or set {name} false"
        )
    return (token_id,) if flag and token_id is not None else ()


def _check_fields(path: Path, fields: Mapping[str, Any], used: frozenset[str]) -> None:
    """Raise TokenizerError for a field that is neither used nor known to be without effect."""
    for name, value in fields.items():
        if name in used or name in LISTS or name in WITHOUT_EFFECT or _names_token(name):
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


def _names_token(name: str) -> bool:
    """Return whether a field names a token, or the token's id: eos_token, image_token_id.

    Models with pictures or sounds have such fields of their own.
    """
    return name.endswith(("_token", "_token_id")) and not name.startswith("add_")


def _named(path: Path, fields: Mapping[str, Any]) -> dict[str, DeclaredToken]:
    """Return the tokens of fields such as eos_token, and of objects with such fields."""
    names = [name for name in fields if _names_token(name) and name.endswith("_token")]
    named = {name: fields[name] for name in names if fields[name] is not None}
    for name in LISTS:
        if isinstance(fields.get(name), dict):
            named |= fields[name]
    tokens = {name: token_of(path, name, value, special=True) for name, value in named.items()}
    return _in_order(tokens)


def _in_order(named: Mapping[str, DeclaredToken]) -> dict[str, DeclaredToken]:
    """Return the named tokens, those of NAMES first, in the order in which they get ids."""
    ordered = [*(name for name in NAMES if name in named), *named]
    return {name: named[name] for name in ordered}


def _listed(path: Path, fields: Mapping[str, Any]) -> dict[str, DeclaredToken]:
    """Return the tokens in lists such as additional_special_tokens, by their names."""
    tokens = dict[str, DeclaredToken]()
    for name in LISTS:
        value = fields.get(name) or []
        if not isinstance(value, list | dict):
            raise TokenizerError(f"{path}: {name} is {value!r:.80}; expected a list of tokens")
        for entry in value if isinstance(value, list) else []:
            token = token_of(path, name, entry, special=True)
            tokens.setdefault(token.name, token)
    return tokens


def _special_among(
    tokens: tuple[DeclaredToken, ...], names: Collection[str]
) -> tuple[DeclaredToken, ...]:
    """Return the tokens, special where they have one of the names."""
    return tuple(token.as_special() if token.name in names else token for token in tokens)


def _kept_as_written(config: Mapping[str, Any], old_map: Mapping[str, Any]) -> frozenset[str]:
    """Return the names in added_tokens.json that are looked for in text as it is written.

    All others are looked for in normalized text. transformers decides by which fields name a token,
    and in which form, when it reads added_tokens.json.
    """
    plain = [config.get(name) for name in NAMES]
    plain += [entry for name in LISTS[:2] for entry in config.get(name) or []]
    mapped = [old_map.get(name) for name in NAMES]
    extra = old_map.get("extra_special_tokens")
    mapped += extra if isinstance(extra, list) else []
    named = (value.get("content") if isinstance(value, dict) else value for value in mapped)
    return frozenset(name for name in (*plain, *named) if isinstance(name, str))


def _control_tokens(path: Path, fields: Mapping[str, Any]) -> frozenset[str]:
    names = fields.get("chat_control_tokens") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TokenizerError(f"{path}: chat_control_tokens is {names!r:.80}; expected names")
    return frozenset(names)


def _flag(path: Path, fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise TokenizerError(f"{path}: {name} is {value!r}; expected true, false or null")
