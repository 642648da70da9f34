"""Rows for the sampler, packed as the engine packs them, and a sampler that sorts."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.engine.device.row_packing import (
    admission_layout,
    allowed_bits,
    pack_admission,
    token_counts,
)
from jaxserve.engine.device.sampling import SMALL_FIELDS, LargeRowFields
from jaxserve.engine.host.plan_builder import admission_of
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import Admission
from jaxserve.engine.row_fields import ROW_FIELDS, RowSampling
from jaxserve.request import Request, ThoughtBudget
from jaxserve.sampling_params import MAX_BIASES, SamplingParams

SLOTS = 3


@dataclass(frozen=True, kw_only=True)
class RowParams(SamplingParams):
    """Sampling parameters of a row, with its choice and its tokens so far."""

    choice: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    budget: ThoughtBudget | None = None

    @property
    def history(self) -> tuple[int, ...]:
        return self.prompt + self.output

    @property
    def admission(self) -> Admission:
        """Return the admission that the engine sends for the row."""
        request = Request(id="", prompt=self.prompt, params=self, thought_budget=self.budget)
        seq = Sequence(0, request, self.choice, self.seed or 0, max_tokens=1)
        seq.tokens = list(self.history)
        seq.pages = [[]]
        seq.lane = 0
        seq.row = 0
        return admission_of(seq)


PLAIN = RowParams(temperature=0.0)
EVERYTHING = replace(
    PLAIN,
    seed=2**63 + 5,
    choice=3,
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    prompt=(1, 2, 3, 1),
    output=(5, 5, 1, 66),
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    logprobs=20,
    min_tokens=2**30,
    stop_token_ids=(2, 40),
    logit_bias={1: 5.0, 30: -2.5, 66: 4.0},
    allowed_token_ids=tuple(range(0, 67, 2)) + (1,),
    budget=ThoughtBudget(10, end=21, closing=(20, 21), opening=(5, 5), gap=9),
)


def row_sampling(row_params: Seq[RowParams]) -> RowSampling[np.ndarray]:
    """Pack the small fields of rows as the engine does; fields [B, ...]."""
    layout = admission_layout(groups=1, pages_per_row=1)
    admitted = [layout.unpack_on_host(pack_admission(a.admission, 1)) for a in row_params]
    rows = [SMALL_FIELDS.unpack_on_host(one["fields"]) for one in admitted]
    return RowSampling(**{name: np.stack([row[name] for row in rows]) for name in ROW_FIELDS})


def row_fields(
    row_params: Seq[RowParams], vocab: int, lanes: int = 1
) -> tuple[LargeRowFields, np.ndarray]:
    """Make the large fields, and [A, r] with the row of each entry.

    Rows are taken in reverse order, behind an unused row. Fields that an entry does not use
    hold random numbers, as a row's last sequence would leave them.
    """
    rng = np.random.default_rng(7)
    per_lane = len(row_params) // lanes
    shape = lanes, per_lane + 1
    counts = rng.integers(0, 9, (*shape, vocab), dtype=np.int32)
    bias_ids = rng.integers(0, vocab + 1, (*shape, MAX_BIASES), dtype=np.int32)
    bias_values = rng.normal(0, 50, (*shape, MAX_BIASES)).astype(np.float32)
    mask = rng.integers(0, 2**32, (*shape, SLOTS, -(-vocab // 32)), dtype=np.uint32)
    rows = np.tile(np.arange(per_lane, 0, -1, dtype=np.int32), (lanes, 1))
    for i, a in enumerate(one.admission for one in row_params):
        at = i // per_lane, rows[i // per_lane, i % per_lane]
        if a.history is not None:
            counts[at] = token_counts(a, vocab)
        if a.bias:
            bias_ids[at] = vocab
            bias_values[at] = 0
            bias_ids[at][: len(a.bias)], bias_values[at][: len(a.bias)] = zip(*a.bias, strict=True)
        if a.allowed is not None:
            mask[at][0] = allowed_bits(a.allowed, vocab)  # nothing is drafted here
    large = LargeRowFields(counts=counts, bias_ids=bias_ids, bias_values=bias_values, mask=mask)
    return large, rows


def constrained_logits(logits: np.ndarray, a: RowParams, position: int) -> np.ndarray:
    """Apply allowed tokens, then bias, and rule out end tokens before min_tokens."""
    result = logits.copy()
    if a.allowed_token_ids is not None:
        result[np.setdiff1d(np.arange(len(logits)), a.allowed_token_ids)] = -np.inf
    for token, bias in a.logit_bias.items():
        result[token] += np.float32(bias)
    if position - len(a.prompt) < a.min_tokens:
        result[list(a.stop_token_ids)] = -np.inf
    return result


def penalised_logits(logits: np.ndarray, a: RowParams) -> np.ndarray:
    """Apply the repetition penalty to all tokens so far, the other penalties to the output's."""
    result = logits.astype(np.float64)
    for token in set(a.history):
        result[token] *= a.repetition_penalty if result[token] < 0 else 1 / a.repetition_penalty
    for token in a.output:
        result[token] -= a.frequency_penalty
    for token in set(a.output):
        result[token] -= a.presence_penalty
    return result


def probabilities(logits: np.ndarray, a: RowParams) -> tuple[np.ndarray, float]:
    """Return the probabilities [V] that min_p, top_k and top_p leave, ties included.

    Also returns how close a sum of probabilities came to top_p: below the rounding error, either
    answer is right.
    """
    p = np.exp((logits - logits.max()) / np.float64(a.temperature))
    p[p < np.float32(a.min_p)] = 0
    if a.top_k:
        p[p < np.sort(p)[::-1][min(a.top_k, len(p)) - 1]] = 0
    sums = np.cumsum(np.sort(p)[::-1]) / p.sum()
    if a.top_p == 1:
        return p / p.sum(), np.inf
    p[p < np.sort(p)[::-1][np.searchsorted(sums, np.float32(a.top_p))]] = 0
    return p / p.sum(), float(np.abs(sums - np.float32(a.top_p)).min())
