"""Requests and choices that have not ended: from engine events to text, tokens and completions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from jaxserve.completion import Assembler, Completion, Delta, TextDelta
from jaxserve.engine.events import Times, TokenEvent
from jaxserve.prompts import Prepared
from jaxserve.tokenizer import Tokenizer

# Called with (request id, choice) when the text of a choice met a stop string. Returns the choice's
# last event, or None where that event comes later with the others.
Stop = Callable[[str, int], TokenEvent | None]
NO_TOKENS: Mapping[int, str] = MappingProxyType({})


class OpenChoices:
    """The choices of one request that have not ended, each with its text so far.

    The engine ends a choice by itself at an end token or a length limit. Stop strings are found
    here, in the text, and the engine is told to end the choice.

    Args:
        spelled: Special tokens that are part of the text, by id.
    """

    def __init__(
        self,
        prepared: Prepared,
        seed: int,
        tokenizer: Tokenizer,
        stop: Stop,
        spelled: Mapping[int, str] = NO_TOKENS,
    ):
        self._stop = stop
        self._assemblers = {
            index: Assembler(prepared.request, prepared.text, index, seed, tokenizer, spelled)
            for index in range(prepared.request.params.n)
        }

    def __len__(self) -> int:
        return len(self._assemblers)

    def __contains__(self, index: int) -> bool:
        return index in self._assemblers

    def take(self, event: TokenEvent) -> tuple[TextDelta, Completion | None]:
        """Take in an event of an open choice; return what became final, and the completion if any.

        Events may still come for a choice that has ended: the engine is a step ahead of the text in
        which the stop string was found. The caller drops these (`event.index in choices`).
        """
        assembler = self._assemblers[event.index]
        piece = assembler.push(event)
        last = event
        if assembler.stopped and not event.finish:
            last = self._stop(event.request_id, event.index) or event
        if not last.finish:
            return piece, None
        del self._assemblers[event.index]
        if last.times is None:  # the engine refused the request before it had any
            last = replace(last, times=Times())
        return piece, assembler.completion(last)


class OpenPrompts:
    """The prompts of one call of the Python API that have choices which have not ended.

    Args:
        prompts: Prompts that were submitted to the engine.
        seeds: Seed of each, as the engine returned it.
    """

    def __init__(
        self, prompts: Sequence[Prepared], seeds: Sequence[int], tokenizer: Tokenizer, stop: Stop
    ):
        # By request id.
        self._places = {p.request.id: place for place, p in enumerate(prompts)}
        self._choices = {
            p.request.id: OpenChoices(p, seed, tokenizer, stop)
            for p, seed in zip(prompts, seeds, strict=True)
        }

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._choices

    def take(self, event: TokenEvent) -> Delta | None:
        """Take in an event and return what became final; None for a choice that has ended."""
        choices = self._choices.get(event.request_id)
        if choices is None or event.index not in choices:
            return None  # its stop string came before this token
        piece, completion = choices.take(event)
        if not choices:
            del self._choices[event.request_id]
        place = self._places[event.request_id]
        return Delta(place, event.index, piece.text, tuple(piece.token_ids), completion)
