"""python -m jaxserve.client: the answer to a prompt, as it comes from a server."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from jaxserve.cli.exits import complain, exit_code
from jaxserve.cli.flags import sampling_params
from jaxserve.cli.output import prepare_output
from jaxserve.client.client import Client, Stream
from jaxserve.client.collect import join
from jaxserve.client.flags import check_flags, new_client, parser, read_prompt
from jaxserve.client.results import Delta, Event, Result
from jaxserve.errors import JaxserveError
from jaxserve.request import SamplingParams


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 when there is no answer, or not all of it (one line on standard error says
    why).

    130 after Ctrl-C, 141 when whoever reads standard output went away: what a shell reports for
    those signals.
    """
    args = parser().parse_args(arguments)
    prepare_output(args.json)
    return exit_code(lambda: answer(args), (JaxserveError,))


def answer(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    check_flags(args, params)
    prompt = read_prompt(args)
    with new_client(args) as client:
        return run(client, prompt, params, args)


def run(client: Client, prompt: str, params: SamplingParams, args: argparse.Namespace) -> int:
    watch = Watch()
    with ask(client, prompt, params, args) as stream:
        events = watch.timed(stream)
        result = join(events if args.json else _printed(events))
    if args.json:
        print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
    if args.stats:
        print(watch.summary(result), file=sys.stderr)
    aborted = any(choice.finish_reason == "abort" for choice in result.choices)
    return complain("the request was aborted on the server, before its end") if aborted else 0


def ask(client: Client, prompt: str, params: SamplingParams, args: argparse.Namespace) -> Stream:
    if not args.chat:
        return client.stream(prompt, params)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return client.chat_stream([*system, {"role": "user", "content": prompt}], params)


def _printed(events: Iterator[Event]) -> Iterator[Event]:
    """Text as it comes, with a newline at the end of it, also where that is an error."""
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


class Watch:
    """When tokens came, by the client's clock."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first = self._last = 0.0
        self._with_first = 0  # tokens that came with the first

    def timed(self, events: Stream) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Delta) and event.token_ids:
                self._last = time.monotonic()
                self._first = self._first or self._last
                self._with_first = self._with_first or len(event.token_ids)
            yield event

    def summary(self, result: Result) -> str:
        """One line: tokens, time to the first, time of each later one, rate of all."""
        usage, tokens = result.usage, result.usage.completion_tokens
        later, seconds = tokens - self._with_first, self._last - self._started
        return (
            f"{usage.prompt_tokens} tokens in, {tokens} out"
            + (f" | TTFT {(self._first - self._started) * 1e3:.1f} ms" if tokens else "")
            + (f" | {(self._last - self._first) / later * 1e3:.2f} ms per token" if later else "")
            + (f" | {tokens / seconds:.0f} tokens/s" if tokens else "")
            + f" | {usage.cached_prompt_tokens} cached"
        )


if __name__ == "__main__":
    sys.exit(main())
