"""The model of the fake device: a checksum that a person can compute by hand.

    token at position e+1 = (sum over p = 0..e of (p + 1) * (token[p] + 1)  +  what the row's rules
    add)  mod VOCAB

If the model has a window, the sum begins where the window of position e does. The embedding of a
prompt is that sum up to its last token, and the number of its tokens. `naive` computes the tokens
of a choice from a plain list: the truth that engines are compared with.
"""

from dataclasses import dataclass

from jaxserve.engine.plan import Admission
from jaxserve.engine.row_fields import NEVER, NO_TOKEN
from jaxserve.request import Request

VOCAB = 97
MASK_BYTES = -(-VOCAB // 32) * 4


def weight(position: int, token: int) -> int:
    """Return what one token adds to the checksum."""
    return (position + 1) * (token + 1)


@dataclass(frozen=True)
class Rules:
    """Everything besides earlier tokens that decides a row's next one: its sampling parameters."""

    offset: int  # added to the checksum
    end_after: int  # position from which on end tokens may come
    end_ids: frozenset[int]
    allowed: tuple[int, ...] | None
    penalised: bool
    follows: bool  # a grammar, whose masks come with the steps
    # Tokens that end a thought, and the position of the first; only scripted models heed them.
    closing: tuple[int, ...] = ()
    closes_at: int = NEVER

    @staticmethod
    def of_admission(admission: Admission) -> "Rules":
        """Return the rules as the device gets them."""
        sampling = admission.sampling
        high, low = sampling.key
        seed = (high << 32) + low
        bias = sum(int(value) * (token + 1) for token, value in admission.bias)
        assert bool(sampling.biased) == bool(admission.bias)
        assert bool(sampling.penalised) == (admission.history is not None)
        return Rules(
            offset=seed + 5 * sampling.choice + bias,
            end_after=sampling.end_after,
            end_ids=frozenset(sampling.end_ids) - {NO_TOKEN},
            allowed=admission.allowed,
            penalised=bool(sampling.penalised),
            follows=bool(sampling.masked) and admission.allowed is None,
            closing=tuple(token for token in sampling.closing if token != NO_TOKEN),
            closes_at=sampling.closes_at,
        )

    @staticmethod
    def of_request(request: Request, index: int, seed: int) -> "Rules":
        """Return the rules as the client wants them."""
        params = request.params
        bias = sum(int(value) * (token + 1) for token, value in params.logit_bias.items())
        allowed = params.allowed_token_ids
        penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        return Rules(
            offset=seed + 5 * index + bias,
            end_after=len(request.prompt) + params.min_tokens,
            end_ids=request.end_ids,
            allowed=None if allowed is None else tuple(allowed),
            penalised=penalties != (1, 0, 0),
            follows=request.grammar is not None,
        )

    def ends(self, token: int, position: int) -> bool:
        """Return whether this token, at this position, is the last one."""
        return token in self.end_ids and position >= self.end_after

    def choose(self, total: int, position: int, penalty: int, mask: list[int] | None = None) -> int:
        """Return the token at `position`, given the checksum of those before.

        End tokens cannot come before `end_after`, unless no other token is allowed. mask: the
        tokens that a grammar allows; any token if it allows none.
        """
        value = total + self.offset + (penalty if self.penalised else 0)
        if mask is not None:
            return mask[value % len(mask)] if mask else 0
        if self.allowed is None and position >= self.end_after:
            return value % VOCAB
        barred = self.end_ids if position < self.end_after else frozenset()
        allowed = range(VOCAB) if self.allowed is None else self.allowed
        candidates = [token for token in allowed if token not in barred] or allowed
        return candidates[value % len(candidates)]


def naive(request: Request, index: int, seed: int, n: int, window: int | None = None) -> list[int]:
    """Return the first n tokens of a choice, computed from a plain list and without any page.

    They are fewer if a grammar ends the choice.
    """
    rules = Rules.of_request(request, index, seed)
    tokens = list(request.prompt)
    prompt = len(tokens)
    matcher = request.grammar.matcher() if request.grammar else None
    for _ in range(n):
        seen = window_of(window, len(tokens) - 1)
        total = sum(weight(p, tokens[p]) for p in seen)
        mask = tokens_in(matcher.masks()[0], rules.allowed) if matcher else None
        token = rules.choose(total, len(tokens), penalty_of(tokens, prompt), mask)
        tokens.append(token)
        if matcher and (token in rules.end_ids or not matcher.accept(token) or matcher.ended):
            break
    return tokens[prompt:]


def naive_embedding(prompt: tuple[int, ...], window: int | None = None) -> list[float]:
    """Return the embedding of a prompt, computed without any page."""
    total = sum(weight(p, prompt[p]) for p in window_of(window, len(prompt) - 1))
    return [float(total), float(len(prompt))]


def tokens_in(mask: bytes, allowed: tuple[int, ...] | None = None) -> list[int]:
    """Return the tokens of a mask that are in `allowed` too, if that is given."""
    bits = int.from_bytes(mask, "little")
    return [
        token
        for token in range(8 * len(mask))
        if bits >> token & 1 and (allowed is None or token in allowed)
    ]


def window_of(window: int | None, query: int) -> range:
    """Return the positions that the query at this position attends to."""
    return range(0 if window is None else max(0, query - window + 1), query + 1)


def penalty_of(tokens: list[int] | tuple[int, ...], prompt: int) -> int:
    """Return what penalties add: the prompt's tokens count once, those of the output twice."""
    return sum(t + 1 for t in tokens[:prompt]) + 2 * sum(t + 1 for t in tokens[prompt:])
