"""Row fields: the small numbers that the device keeps of a row's sequence, each declared once.

RowSampling is the declaration. Derived from it are the bytes that the host packs and that follower
hosts receive, the array that the row writer takes, and the one in which the device keeps the fields
of all rows (SMALL_FIELDS in device/sampling.py).
Inside the engine, a parameter that request.SamplingParams has needs one field here, and its use in
device/sampling.py or device/token_choice.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from math import prod
from struct import Struct
from typing import Any, Final, Protocol

import numpy as np

from jaxserve.request import MAX_CLOSING, MAX_EOS_IDS, MAX_OPENING, Request, ThoughtBudget
from jaxserve.sampling_params import MAX_STOP_TOKENS, SamplingParams

MAX_END_IDS = MAX_STOP_TOKENS + MAX_EOS_IDS
MAX_INT32 = 2**31 - 1
NO_TOKEN = MAX_INT32  # padding in lists of token ids: larger than any vocabulary
NEVER = MAX_INT32  # a position that no sequence reaches
_LETTERS: Final = {np.int32: "i", np.uint32: "I", np.float32: "f"}  # of `struct`, by dtype


class Choice(Protocol):
    """One choice of a request, from which fields are filled; the host's Sequence is one."""

    request: Request
    index: int
    seed: int
    prompt_len: int

    @property
    def tokens(self) -> Sequence[int]:
        """Known tokens of prompt and output."""
        ...


@dataclass(frozen=True, slots=True)
class RowField:
    """Declaration of one field of a row."""

    dtype: type  # np.int32, np.uint32 or np.float32
    shape: tuple[int, ...] = ()  # of one row's value
    # Returns a choice's value, a number or a flat list of as many as the shape has; None takes the
    # sampling parameter of the field's name.
    value_of: Callable[[Choice], Any] | None = None
    # Value of rows that do not sample in a step, so that the step does no optional work for them;
    # None keeps the value.
    idle: float | None = None


def row(
    dtype: type,
    shape: tuple[int, ...] = (),
    *,
    of: Callable[[Choice], Any] | None = None,
    idle: float | None = None,
) -> dict[str, Any]:
    """Return the metadata that declares a dataclass field, see RowField."""
    return {"row": RowField(dtype, shape, of, idle)}


def penalises(params: SamplingParams) -> bool:
    """Return whether any penalty is on, so that the device must count tokens."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _key(choice: Choice) -> tuple[int, int]:
    return choice.seed >> 32, choice.seed & 0xFFFFFFFF


def _logprobs(choice: Choice) -> int:
    wanted = choice.request.params.logprobs
    return -1 if wanted is None else wanted


def _end_after(choice: Choice) -> int:
    # The sum may exceed int32. No sequence is as long as MAX_INT32, so the bound changes nothing.
    return min(choice.prompt_len + choice.request.params.min_tokens, MAX_INT32)


def _end_ids(choice: Choice) -> list[int]:
    ids = sorted(choice.request.end_ids)
    return ids + [NO_TOKEN] * (MAX_END_IDS - len(ids))


def _biased(choice: Choice) -> bool:
    return len(choice.request.params.logit_bias) > 0


def _masked(choice: Choice) -> bool:
    request = choice.request
    return request.params.allowed_token_ids is not None or request.grammar is not None


def _penalised(choice: Choice) -> bool:
    return penalises(choice.request.params)


def _begin(choice: Choice, budget: ThoughtBudget) -> int:
    """Return the position at which the tokens of `opening` begin."""
    known = choice.tokens[choice.prompt_len : choice.prompt_len + 1]
    return choice.prompt_len + (budget.gap is not None and list(known) == [budget.gap])


def _closes_at(choice: Choice) -> int:
    """Return where the thought is closed; NEVER without a budget, or if it has ended already."""
    budget = choice.request.thought_budget
    if budget is None:
        return NEVER
    opens_at = _begin(choice, budget)
    begin = opens_at + len(budget.opening)
    known = tuple(choice.tokens[opens_at:begin])
    if known != budget.opening[: len(known)]:
        return NEVER
    closes_at = min(begin + budget.tokens, NEVER)
    return NEVER if budget.end in choice.tokens[begin:closes_at] else closes_at


def _closing(choice: Choice) -> list[int]:
    budget = choice.request.thought_budget
    ids = list(budget.closing) if budget else []
    return ids + [NO_TOKEN] * (MAX_CLOSING - len(ids))


def _thought_end(choice: Choice) -> int:
    budget = choice.request.thought_budget
    return budget.end if budget else NO_TOKEN


def _opens_at(choice: Choice) -> int:
    budget = choice.request.thought_budget
    return _begin(choice, budget) if budget and budget.opening else NEVER


def _opening(choice: Choice) -> list[int]:
    budget = choice.request.thought_budget
    ids = list(budget.opening) if budget else []
    return ids + [NO_TOKEN] * (MAX_OPENING - len(ids))


def _gap(choice: Choice) -> int:
    """Return the token that may stand before `opening`, as long as none does."""
    budget = choice.request.thought_budget
    if budget is None or budget.gap is None or _begin(choice, budget) > choice.prompt_len:
        return NO_TOKEN
    return budget.gap


@dataclass(frozen=True)
class RowSampling[T]:
    """Parameters that a row's next tokens are sampled with.

    T is a number or a tuple of numbers on the host, where the class stands for one row, and an
    array on the device, where its leading axis is [B] for the B rows that a step samples in all
    lanes, or [A, R] for R rows in each of A lanes.
    """

    key: T = field(metadata=row(np.uint32, (2,), of=_key))  # the seed's high and low half
    choice: T = field(metadata=row(np.int32, of=lambda choice: choice.index))
    temperature: T = field(metadata=row(np.float32, idle=0))
    top_k: T = field(metadata=row(np.int32))
    top_p: T = field(metadata=row(np.float32))
    min_p: T = field(metadata=row(np.float32))
    repetition_penalty: T = field(metadata=row(np.float32))
    presence_penalty: T = field(metadata=row(np.float32))
    frequency_penalty: T = field(metadata=row(np.float32))
    logprobs: T = field(metadata=row(np.int32, of=_logprobs, idle=-1))  # alternatives; -1: none
    # First position at which an end token may be sampled.
    end_after: T = field(metadata=row(np.int32, of=_end_after, idle=0))
    end_ids: T = field(metadata=row(np.int32, (MAX_END_IDS,), of=_end_ids))  # padded with NO_TOKEN
    # 1 where the row uses the large fields for biases, masks or token counts, else 0.
    biased: T = field(metadata=row(np.int32, of=_biased, idle=0))
    masked: T = field(metadata=row(np.int32, of=_masked, idle=0))
    penalised: T = field(metadata=row(np.int32, of=_penalised, idle=0))
    # Position of the first token of `closing`, which is padded with NO_TOKEN. NEVER without a
    # budget; becomes NEVER once a thought ends before, or the output does not begin with one.
    closes_at: T = field(metadata=row(np.int32, of=_closes_at))
    closing: T = field(metadata=row(np.int32, (MAX_CLOSING,), of=_closing))
    thought_end: T = field(metadata=row(np.int32, of=_thought_end))  # token that ends a thought
    # Position of the first token of `opening`, which is padded with NO_TOKEN; NEVER without any.
    # One later if the output begins with the token `gap`.
    opens_at: T = field(metadata=row(np.int32, of=_opens_at))
    opening: T = field(metadata=row(np.int32, (MAX_OPENING,), of=_opening))
    gap: T = field(metadata=row(np.int32, of=_gap))  # NO_TOKEN once it has come


ROW_FIELDS: Final[Mapping[str, RowField]] = {
    declared.name: declared.metadata["row"] for declared in fields(RowSampling)
}
_FORMATS = [f"{prod(declared.shape)}{_LETTERS[declared.dtype]}" for declared in ROW_FIELDS.values()]
_ROW_STRUCT = Struct("<" + "".join(_FORMATS))
ROW_BYTES = _ROW_STRUCT.size


def pack_row(choice: Choice) -> bytes:
    """Pack the fields of a choice into ROW_BYTES, one after the other as little-endian numbers."""
    numbers: list[float] = []
    for name, declared in ROW_FIELDS.items():
        if declared.value_of:
            value = declared.value_of(choice)
        else:
            value = getattr(choice.request.params, name)
        numbers += value if declared.shape else [value]
    return _ROW_STRUCT.pack(*numbers)


def unpack_row(packed: bytes) -> RowSampling[Any]:
    """Return the fields as numbers and tuples of numbers; floats have the precision of float32."""
    numbers = iter(_ROW_STRUCT.unpack(packed))
    values: dict[str, Any] = {}
    for name, declared in ROW_FIELDS.items():
        if declared.shape:
            values[name] = tuple(islice(numbers, prod(declared.shape)))
        else:
            values[name] = next(numbers)
    return RowSampling(**values)
