"""The program behind jaxserve client, which prints an answer as it arrives."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from jaxserve.cli.exits import complain, exit_code
from jaxserve.cli.output import prepare_output
from jaxserve.cli.sampling_flags import sampling_fields
from jaxserve.client.client import Client, Stream
from jaxserve.client.collect import join
from jaxserve.client.errors import CallError
from jaxserve.client.flags import ClientOptions, check_flags, new_client, parse, parser, read_prompt
from jaxserve.client.results import Delta, Event, Result
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.sampling_params import SamplingFields, SamplingParams

__all__ = ["main", "parser"]

REFUSED = "Connection refused"  # in gRPC's text where nothing listens


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    0 for a whole answer; 2 for none or a part of one, with one line on standard error that says
    why; 130 after Ctrl-C, and 141 when standard output was closed, as a shell reports the signals.
    """
    options = parse(arguments)
    prepare_output(options.json)
    return exit_code(lambda: answer(options))


def answer(options: ClientOptions) -> int:
    """Check the options, read the prompt and print the answer."""
    sampling = sampling_fields(options.sampling, options.json)
    check_flags(options, SamplingParams(**sampling))
    prompt = read_prompt(options)
    with new_client(options.server) as client:
        try:
            return run(client, prompt, sampling, options)
        except CallError as error:
            if REFUSED not in error.details:
                raise
            raise ConfigError(
                f"no server answers at {options.server.address}; start one: jaxserve serve"
            ) from None


def run(client: Client, prompt: str, sampling: SamplingFields, options: ClientOptions) -> int:
    """Print the answer to a prompt, and its latencies with --stats."""
    watch = Stopwatch()
    with ask(client, prompt, sampling, options) as stream:
        events = watch.timed(stream)
        result = join(events if options.json else _printed(events))
        result = replace(result, ignored=stream.ignored)
    if options.json:
        print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
    elif result.ignored:
        print(f"without effect on this model: {', '.join(result.ignored)}", file=sys.stderr)
    if options.stats:
        print(watch.summary(result), file=sys.stderr)
    if any(choice.finish_reason == "abort" for choice in result.choices):
        return complain("the request was aborted on the server, before its end")
    return 0


def ask(client: Client, prompt: str, sampling: SamplingFields, options: ClientOptions) -> Stream:
    """Send the prompt as it is, or as a user's message with --chat."""
    if not options.chat:
        return client.stream(prompt, **sampling)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    return client.chat_stream(messages, **sampling, **options.template)


def _printed(events: Iterator[Event]) -> Iterator[Event]:
    """Print text as it arrives, and a newline at its end, even if an error ends it."""
    begun = False
    try:
        for event in events:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
                begun = True
            yield event
    except JaxserveError:
        if begun:
            print(flush=True)
        raise
    print(flush=True)


class Stopwatch:
    """Arrival times of an answer's tokens, by the client's clock."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first = 0.0
        self._last = 0.0
        self._tokens_with_first = 0  # the first event may bring several tokens

    def timed(self, events: Iterable[Event]) -> Iterator[Event]:
        """Pass events on and note when tokens came."""
        for event in events:
            if isinstance(event, Delta) and event.token_ids:
                self._last = time.monotonic()
                if not self._tokens_with_first:
                    self._first = self._last
                    self._tokens_with_first = len(event.token_ids)
            yield event

    def summary(self, result: Result) -> str:
        """Return one line: tokens, time to the first, time per later token, and overall rate."""
        usage = result.usage
        tokens = usage.completion_tokens
        later = tokens - self._tokens_with_first
        parts = [f"{usage.prompt_tokens} tokens in, {tokens} out"]
        if tokens:
            parts.append(f"TTFT {(self._first - self._started) * 1e3:.1f} ms")
        if later:
            parts.append(f"{(self._last - self._first) / later * 1e3:.2f} ms per token")
        if tokens:
            parts.append(f"{tokens / (self._last - self._started):.0f} tokens/s")
        parts.append(f"{usage.cached_prompt_tokens} cached")
        return " | ".join(parts)
