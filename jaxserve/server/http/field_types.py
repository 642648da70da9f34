"""Types of fields in request bodies, with the checks of their values."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from jaxserve.sampling_params import MAX_BIASES

# Validators raise ValueError with a text that continues the field's name: "has 3 entries; ...".


def _no_lone_surrogate(text: str) -> str:
    """Refuse half a surrogate pair: JSON can write one, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"has half a surrogate pair at character {error.start}; send both halves"
        ) from None
    return text


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def prompts(value: Any, limit: int) -> list[str | list[int]]:
    """Return one or several prompts, each a text or token ids, as a list.

    The service checks the ids themselves.
    """
    if _is_one_prompt(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if len(value) > limit:
        raise ValueError(f"has {len(value)} entries; the limit is {limit}")
    kind = type(value[0])
    for i, prompt in enumerate(value):
        if type(prompt) is not kind:
            raise ValueError(
                f"has an entry {i} of another kind than the first; all must be strings, or all "
                f"lists of token ids"
            )
    return [_no_lone_surrogate(prompt) if isinstance(prompt, str) else prompt for prompt in value]


def _is_one_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    # A list that begins with neither a string nor a list is one prompt of token ids.
    return isinstance(value, list) and bool(value) and not isinstance(value[0], str | list)


def _biases(value: Any) -> dict[int, Any]:
    """Return the biases by token id; SamplingParams checks the numbers."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries; the limit is {MAX_BIASES}")
    for key in value:
        if not _is_integer(key):
            raise ValueError(f'has the key {key!r:.80}; keys are token ids, such as "50256"')
    return {int(key): bias for key, bias in value.items()}


def _is_integer(text: str) -> bool:
    """Return whether the text is an integer exactly as Python writes it: not "+1", not "01"."""
    return text.isascii() and text.removeprefix("-").isdigit() and str(int(text)) == text


Text = Annotated[str, AfterValidator(_no_lone_surrogate)]
Texts = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Biases = Annotated[dict[int, Any], PlainValidator(_biases)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
