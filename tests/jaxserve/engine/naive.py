"""Oracle without cache, batch or jit: the decoder in numpy, and a sampler that sorts."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxserve.engine.device.token_choice import gumbel
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request


def to_numpy(params: dict) -> dict:
    return jax.tree.map(lambda x: np.asarray(x, np.float32), params)


def forward(
    weights: dict,
    spec: ModelSpec,
    tokens: list[int],
    as_stored: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Return logits of every position, [T, V], in the weights' precision.

    as_stored: maps keys and values [T, K, H] to what attention sees of them; called layer by layer.
    """
    x = weights["embed"][tokens]
    angles = np.outer(np.arange(len(tokens)), spec.rope.inverse_frequencies(spec.head_dim))
    cos = np.cos(angles)[:, None].astype(np.float32)
    sin = np.sin(angles)[:, None].astype(np.float32)
    for w, kind in zip(weights["layers"], spec.kinds, strict=True):
        h = _norm(x, w["attn_norm"], spec.norm_eps)
        heads = np.einsum("td,dkqh->tkqh", h, w["qkv"])
        q = _rotate(heads[:, :, :-2].reshape(len(x), -1, spec.head_dim), cos, sin)
        k = as_stored(_rotate(heads[:, :, -2], cos, sin))
        v = as_stored(heads[:, :, -1])
        x = x + np.einsum(
            "tnh,nhd->td", _attention(q, k, v, kind.window, spec.attn_softcap), w["o"]
        )
        h = _norm(x, w["mlp_norm"], spec.norm_eps)
        gate = h @ w["gate_up"][:, 0]
        up = h @ w["gate_up"][:, 1]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"]
    x = _norm(x, weights["norm"], spec.norm_eps)
    return x @ (weights["embed"].T if spec.tied_head else weights["head"])


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, softcap: float | None
) -> np.ndarray:
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(np.float32(q.shape[-1]))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    seen = np.tril(np.ones(scores.shape[1:], bool))
    if window is not None:
        seen &= ~np.tril(seen, -window)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)


@dataclass
class Answer:
    """Expected output of one choice.

    gaps: distance of each chosen token from the next best one. scores: log-softmax of raw logits.
    """

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)
    prompt_scores: np.ndarray | None = None
    finish: str = "length"


def generate(
    weights: dict, spec: ModelSpec, request: Request, seed: int, choice: int, max_tokens: int
) -> Answer:
    """Return what one choice of the request has to give; stop strings are not applied."""
    answer = Answer()
    tokens = list(request.prompt)
    while len(answer.tokens) < max_tokens:
        logits = forward(weights, spec, tokens)
        if answer.prompt_scores is None:
            answer.prompt_scores = _log_softmax(logits[:-1])
        answer.scores.append(_log_softmax(logits[-1]))
        values = process(logits[-1].astype(np.float64), request, tokens, seed, choice)
        second, first = np.sort(values)[-2:]
        answer.gaps.append(float(first - second))
        token = int(values.argmax())
        tokens.append(token)
        answer.tokens.append(token)
        if token in request.end_ids:
            answer.finish = "stop"
            break
    return answer


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def process(
    logits: np.ndarray, request: Request, tokens: list[int], seed: int, choice: int
) -> np.ndarray:
    """Return the logits after all processors in the documented order, with the noise added."""
    p = request.params
    prompt_len = len(request.prompt)
    output = tokens[prompt_len:]
    if p.allowed_token_ids is not None:
        logits = np.where(np.isin(np.arange(len(logits)), p.allowed_token_ids), logits, -np.inf)
    for token, bias in p.logit_bias.items():
        logits[token] += bias
    if len(output) < p.min_tokens:
        logits[list(request.end_ids)] = -np.inf
    for token in set(tokens):
        logits[token] *= p.repetition_penalty if logits[token] < 0 else 1 / p.repetition_penalty
    for token in set(output):
        logits[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    if p.temperature == 0:
        return logits
    return _truncate(logits / p.temperature, request) + _noise(
        seed, choice, len(tokens), len(logits)
    )


def _truncate(logits: np.ndarray, request: Request) -> np.ndarray:
    p = request.params
    if p.min_p:
        logits = np.where(logits >= logits.max() + np.log(p.min_p), logits, -np.inf)
    if p.top_k:
        logits = np.where(logits >= np.sort(logits)[::-1][: p.top_k][-1], logits, -np.inf)
    if p.top_p < 1:
        order = np.argsort(-logits)
        mass = np.exp(logits - logits.max())[order].cumsum()
        kept = np.searchsorted(mass, p.top_p * mass[-1]) + 1
        logits = np.where(logits >= logits[order[kept - 1]], logits, -np.inf)
    return logits


def _noise(seed: int, choice: int, position: int, vocab: int) -> np.ndarray:
    key = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    drawn = _gumbel(key, np.array([choice], np.int32), np.array([position], np.int32), vocab)
    return np.asarray(drawn[0], np.float64)


_gumbel = jax.jit(gumbel, static_argnums=3)
