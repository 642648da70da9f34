"""Answers of the model as frozen dataclasses.

Times are seconds, and log-probabilities natural logarithms.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token and its log-probability under the model's own distribution.

    Attributes:
        token_id: Id of the token.
        token: Text of the token, for people: its bytes may be no whole characters.
        logprob: Natural logarithm of its probability.
    """

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob(Logprob):
    """A token of a text, with alternatives.

    Attributes:
        top: The most probable tokens in its place, as many as were asked for.
    """

    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Times of one choice, by the server's clock.

    Attributes:
        queue_seconds: From arrival in the engine to the first step.
        prefill_seconds: From the first step to the first token.
        first_token_seconds: From arrival in the engine to the first token.
        decode_seconds: From the first token to the last.
        total_seconds: From arrival in the engine to the end.
        preemptions: How often the choice lost its pages and was computed again.
        padding_share: Share of padding in what the engine computed meanwhile, 0 to 1.
        bucket: Compiled shape of the choice's last step, such as "decode[16]".
        drafted_tokens: Drafted tokens that were verified.
        accepted_tokens: Drafted tokens that the model accepted.
        verifications: Steps that verified drafted tokens.
    """

    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    preemptions: int
    padding_share: float
    bucket: str
    drafted_tokens: int
    accepted_tokens: int
    verifications: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Numbers of tokens of a request.

    Attributes:
        prompt_tokens: Tokens of the prompt, counted once however many choices there are.
        cached_prompt_tokens: Prompt tokens that were found in the prefix cache.
        completion_tokens: Tokens of all choices.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinish:
    """How one choice ended.

    Attributes:
        index: Number of the choice, from 0.
        finish_reason: "stop", "length", "abort", or "tool_calls" for a stop after calls of tools.
        stopped_by: The stop string or the token id that ended the choice; None for neither.
        seed: Seed of the choice, as it was given or drawn by the server.
        timings: Where its time went.
    """

    index: int
    finish_reason: str
    stopped_by: str | int | None
    seed: int
    timings: Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model calls.

    Attributes:
        id: Id of the call, for the message with its result.
        name: Name of the function.
        arguments: JSON text of an object, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A part of a call, as it arrives in a stream.

    Attributes:
        index: Number of the call in its choice, from 0.
        id: Id of the call in its first part, and empty in the others.
        name: Name of the function in its first part, and empty in the others.
        arguments: Text that continues the arguments of the parts before.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(ChoiceFinish):
    """One finished choice.

    Attributes:
        text: Text of the choice.
        token_ids: Its tokens, with the one that ended it.
        logprobs: One entry per token; empty unless they were asked for.
        reasoning_content: What the model thought before its answer, in a conversation.
        tool_calls: Functions that the model calls, in a conversation.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The whole answer to a prompt or a conversation.

    Attributes:
        request_id: Id of the request, as it was given or made by the server.
        choices: All choices, by index.
        usage: Numbers of tokens.
        prompt_logprobs: Log-probabilities of the prompt from its second token on, if asked for.
        ignored: Names of options of a conversation, and of keys of its messages, that changed
            nothing since the chat template does not read them. Of a stream, the stream has them.
    """

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """First event of a stream: the prompt was computed.

    Attributes:
        request_id: Id of the request, as it was given or made by the server.
        prompt_tokens: Tokens of the prompt.
        cached_prompt_tokens: Prompt tokens that were found in the prefix cache.
    """

    request_id: str
    prompt_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """A part of the prompt's log-probabilities.

    Attributes:
        start: Position of the first entry in the prompt.
        entries: One entry per token.
    """

    start: int
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A part of one choice that is final.

    Attributes:
        index: Number of the choice, from 0.
        text: Text that continues the choice; may be empty, and never ends in half a character.
        token_ids: Tokens that continue the choice.
        logprobs: One entry per token; empty unless they were asked for.
        reasoning_content: Text that continues what the model thinks before its answer.
        tool_calls: Parts of calls.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Last event of a stream that was not cut short.

    Attributes:
        choices: How each choice ended.
        usage: Numbers of tokens.
    """

    choices: tuple[ChoiceFinish, ...]
    usage: Usage


Event = PromptInfo | PromptLogprobs | Delta | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of a given text.

    Attributes:
        request_id: Id of the request, as it was given or made by the server.
        token_ids: Tokens of the text.
        logprobs: One entry per token from the second on.
        total_logprob: Sum of the entries.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    total_logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Embeddings of texts.

    Attributes:
        request_id: Id of the request, as it was given or made by the server.
        embeddings: One vector per text, in their order, of length 1 and in float32 precision.
        usage: Numbers of tokens.
    """

    request_id: str
    embeddings: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """Token ids as the model would read them.

    Attributes:
        token_ids: Tokens of the prompt.
        prompt: The text, or the rendered conversation.
    """

    token_ids: tuple[int, ...]
    prompt: str
