"""python -m jaxserve.generate: text or a conversation from a checkpoint, on whatever machine this is."""

import argparse
import errno
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoints.errors import CheckpointError
from jaxserve.chat.conversation import HINT, Conversation, lines_of, typed_turns
from jaxserve.completion import Completion, Delta
from jaxserve.config import PRESETS, EngineOptions
from jaxserve.errors import ConfigError, JaxserveError, RequestError
from jaxserve.llm import LLM, Prepared
from jaxserve.request import SamplingParams
from jaxserve.tokenizer import Tokenizer, TokenizerError
from pallas_kernels.dispatch import KernelError
from sharding.mesh import MeshSpec
from sharding.rules import ShardingError

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "bundled" / "tiny-chat"
BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
EXPECTED = (JaxserveError, CheckpointError, TokenizerError, ShardingError, KernelError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 when something asked for cannot be done (each such thing is one line on standard error).

    130 after Ctrl-C, 141 when whoever reads standard output went away: what a shell reports for those signals.
    """
    args = parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    prepare_output(args.json)
    try:
        params = sampling_params(args)
        check_chat_flags(args, params)
        prompts = [] if args.chat else read_prompts(args)
        turns = read_turns(args) if args.chat else []
        use_compilation_cache(args.compilation_cache)
        with open_llm(args, console) as llm:
            if args.chat:
                return talk(llm, turns, params, args, console)
            return run(llm, prompts, params, args.json, console)
    except EXPECTED as error:
        return _complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's own last flush succeeds
        return PIPE_CLOSED


def _complain(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


# ---- flags


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m jaxserve.generate", description="Generate text from a checkpoint.")
    p.add_argument(
        "--model",
        type=Path,
        default=BUNDLED,
        metavar="DIR",
        help="checkpoint folder as Hugging Face publishes it (default: the bundled model)",
    )
    _prompt_flags(p.add_argument_group("prompts (default: standard input, as one prompt, without its last newline)"))
    _chat_flags(p.add_argument_group("conversation"))
    _sampling_flags(p.add_argument_group("sampling"))
    _engine_flags(p.add_argument_group("engine"))
    return p


def _prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    group.add_argument(
        "--prompts-file", type=Path, metavar="F", help="UTF-8, one prompt per line; empty lines are skipped"
    )
    group.add_argument(
        "--json", action="store_true", help="one JSON object per completion, nothing else on standard output"
    )


def _chat_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chat",
        action="store_true",
        help="prompts are turns of one conversation, answered in their order; standard input has one turn per line; "
        f"at a terminal you type them ({HINT})",
    )
    group.add_argument("--system", metavar="TEXT", help="the system's message")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template, instead of the model's")


def _sampling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="default: until the model ends its text, or the context is full"
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end token before this many")
    group.add_argument("--temperature", type=float, metavar="X", help="0: always the most probable token (default 1.0)")
    group.add_argument("--seed", type=int, metavar="S")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--logit-bias", type=_json_bias, metavar="JSON", help='{"token id": bias, ...}')
    group.add_argument("--allowed-token-ids", type=_ids, metavar="ID,ID,...")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )
    group.add_argument("--stop-token-ids", type=_ids, metavar="ID,ID,...")
    group.add_argument("--include-stop", action="store_true", default=None, help="keep what ended the text in the text")
    group.add_argument("--ignore-eos", action="store_true", default=None)
    group.add_argument("--n", type=int, metavar="N", help="completions per prompt")
    group.add_argument("--logprobs", type=int, metavar="K", help="log-probabilities with K alternatives (in --json)")
    group.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same of the prompt's tokens (in --json)")
    group.add_argument("--echo", action="store_true", default=None, help="text begins with the prompt")


def _engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    group.add_argument("--prefer", choices=list(PRESETS), help="default: balanced")
    group.add_argument("--max-batch", type=int, metavar="N", help="sequences that run together")
    group.add_argument("--step-tokens", type=int, metavar="N", help="the most tokens one step computes")
    group.add_argument("--page-size", type=int, metavar="N", help="tokens per page of the KV cache")
    group.add_argument("--cache-tokens", type=int, metavar="N", help="size of the KV cache")
    group.add_argument("--max-context", type=int, metavar="N", help="the longest prompt plus output")
    group.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", default=None)
    group.add_argument(
        "--deterministic", action="store_true", default=None, help="same tokens bit for bit, whatever the load"
    )
    group.add_argument("--attention", help="auto, or the name of an implementation")
    group.add_argument("--data", type=int, default=1, help="mesh: data-parallel lanes")
    group.add_argument("--tensor", type=int, default=1, help="mesh: tensor parallelism")
    group.add_argument(
        "--compilation-cache",
        type=Path,
        metavar="DIR",
        help="where compiled steps are kept (default: the user's cache)",
    )


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None


def _json_bias(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object like {{"17": -1.5}}') from None


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams) if getattr(args, f.name, None) is not None}
    for name in ("logprobs", "prompt_logprobs"):
        if name in given and not args.json:
            raise RequestError(f"--{name.replace('_', '-')}", "is shown in JSON only (add --json)")
    return SamplingParams(**given)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    given = {f.name: getattr(args, f.name) for f in fields(EngineOptions) if getattr(args, f.name, None) is not None}
    return EngineOptions(**given)


def check_chat_flags(args: argparse.Namespace, params: SamplingParams) -> None:
    """RequestError for flags that a conversation has no use for, and those that only a conversation has."""
    if not args.chat:
        for flag in ("system", "chat_template"):
            if getattr(args, flag) is not None:
                raise RequestError(f"--{flag.replace('_', '-')}", "is for a conversation (add --chat)")
    elif params.n > 1 or params.echo:
        flag, what = ("--n", f"is {params.n}") if params.n > 1 else ("--echo", "is given")
        raise RequestError(flag, f"{what}, but a turn of a conversation has one answer, and only that (leave it out)")


def read_turns(args: argparse.Namespace) -> Iterable[str]:
    """The turns of a conversation; those of standard input as they come."""
    if args.prompt or args.prompts_file:
        return read_prompts(args)
    return typed_turns("" if args.json else "> ") if is_typed(args) else lines_of(_standard_input().buffer)


def is_typed(args: argparse.Namespace) -> bool:
    """Whether a person types the turns, and can end an answer."""
    return not (args.prompt or args.prompts_file) and _standard_input().isatty()


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt or ())
    if args.prompts_file:
        name = str(args.prompts_file)
        text = _decode(_read_file(args.prompts_file), "--prompts-file", name).removeprefix("\ufeff")
        prompts += filter(None, text.replace("\r\n", "\n").split("\n"))
        if not prompts:
            raise RequestError("--prompts-file", f"{name} has no prompts (one per line; empty lines are skipped)")
    return prompts or [_read_standard_input()]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError("--prompts-file", f"{path}: {error.strerror}") from None


def _read_standard_input() -> str:
    if _standard_input().isatty():
        print("reading the prompt from standard input (end with Ctrl-D)", file=sys.stderr)
    return _decode(_standard_input().buffer.read(), "standard input", "the prompt").removesuffix("\n")


def _standard_input() -> TextIO:
    if sys.stdin is None or sys.stdin.closed:
        raise RequestError("--prompt", "is missing, and there is no standard input to read one from")
    return sys.stdin


def _decode(text: bytes, field: str, what: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(field, f"{what} is not UTF-8 text (byte {error.start}: {error.reason})") from None


# ---- getting ready


def prepare_output(as_json: bool) -> None:
    """JSON is UTF-8 whatever the terminal speaks; of text, a letter that the terminal lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8" if as_json else None, errors="strict" if as_json else "replace")


def use_compilation_cache(chosen: Path | None) -> None:
    """Keep compiled steps on disk, so that the next start finds them."""
    folder = chosen or default_compilation_cache()
    try:
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "there is no home directory")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if chosen:
            raise ConfigError(f"--compilation-cache {chosen}: {error.strerror}") from None
        print(f"compiled steps are not kept: {folder or '~'}: {error.strerror} (--compilation-cache)", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def default_compilation_cache() -> Path | None:
    """The user's cache folder for jaxserve; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxserve" / "xla" if os.path.isabs(base) else None


def open_llm(args: argparse.Namespace, console: Console) -> LLM:
    loading, compiling = _Bar(console, "loading"), _Bar(console, "compiling")
    with loading:
        return LLM(
            args.model,
            dtype=args.dtype,
            options=engine_options(args),
            mesh=MeshSpec(data=args.data, tensor=args.tensor),
            chat_template=args.chat_template,
            on_load=loading.update,
            on_compile=compiling.update,
        )


class _Bar:
    """A progress bar that appears with the first update and disappears with the last."""

    def __init__(self, console: Console, title: str):
        columns = (
            TextColumn(f"{title:9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = None

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total, description=what)
        if done >= total:
            self._progress.stop()


# ---- running and printing


def run(llm: LLM, prompts: list[str], params: SamplingParams, as_json: bool, console: Console) -> int:
    """Generate for every prompt that can run; the others get their error line and leave the rest undisturbed."""
    prepared: list[Prepared] = []
    numbers: list[int] = []  # of the prompts that run, among all
    code = 0
    for number, prompt in enumerate(prompts):
        try:
            prepared.append(llm.prepare(prompt, params, f"prompt {number + 1}" if len(prompts) > 1 else "prompt"))
            numbers.append(number)
        except RequestError as error:
            code = _complain(error)
    printer = _JsonPrinter(llm.model.tokenizer) if as_json else _TextPrinter(alone=len(prompts) * params.n == 1)
    llm.warm_up(prepared)
    started, done = time.monotonic(), list[Completion]()
    for delta in _in_order(llm.run(prepared), [(i, k) for i in range(len(prepared)) for k in range(params.n)]):
        printer.show(numbers[delta.prompt_index], delta)
        if delta.completion:
            done.append(delta.completion)
            if delta.completion.error:
                code = _complain(delta.completion.error)
    if done:
        console.print(summary(done, time.monotonic() - started, llm.padding_share), style="dim", soft_wrap=True)
    return code


def talk(llm: LLM, turns: Iterable[str], params: SamplingParams, args: argparse.Namespace, console: Console) -> int:
    """Answer the turns of a conversation, each before the next is read; one that cannot be answered is forgotten."""
    llm.chat_template  # noqa: B018 (before anybody types: ChatError when there is none)
    printer = _JsonPrinter(llm.model.tokenizer) if args.json else _TextPrinter(alone=True)
    stream = partial(llm.stream, params=params)
    conversation = Conversation(stream, printer, _complain, args.system, interactive=is_typed(args))
    conversation.hold(turns)
    if conversation.done:
        seconds = sum(completion.timings.total for completion in conversation.done)
        console.print(summary(conversation.done, seconds, llm.padding_share), style="dim", soft_wrap=True)
    return BAD_INPUT if conversation.failed else 0


def _in_order(deltas: Iterator[Delta], order: list[tuple[int, int]]) -> Iterator[Delta]:
    """One choice after the other: the first unfinished one live; what comes early for later ones waits for its turn."""
    early: dict[tuple[int, int], list[Delta]] = {key: [] for key in order}
    turns = iter(order)
    turn = next(turns, None)
    for delta in deltas:
        early[delta.prompt_index, delta.index].append(delta)
        while turn and early[turn]:
            shown = early[turn].pop(0)
            yield shown
            if shown.completion:
                turn = next(turns, None)


class _JsonPrinter:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def show(self, number: int, delta: Delta) -> None:
        if delta.completion:
            done = {"prompt_index": number} | delta.completion.to_json(self._tokenizer)
            print(json.dumps(done, ensure_ascii=False), flush=True)

    def cut(self) -> None:
        """An answer that was interrupted has no completion, and no object."""


class _TextPrinter:
    """Text as it comes, a headline before each choice unless there is only one."""

    def __init__(self, alone: bool):
        self._alone = alone
        self._fresh = True

    def show(self, number: int, delta: Delta) -> None:
        if self._fresh and not self._alone:
            print(f"--- prompt {number + 1}, choice {delta.index + 1}")
        print(delta.text, end="\n" if delta.completion else "", flush=True)
        self._fresh = delta.completion is not None

    def cut(self) -> None:
        print()


def summary(done: list[Completion], seconds: float, padding: float) -> str:
    """One line: tokens, rates, what came from the cache, and the share of computed tokens that were padding.

    TTFT and time per token are medians over the completions that have one: a first token, a second token.
    """
    prompts = {id(c.prompt_token_ids): c for c in done}.values()
    tokens_in, tokens_out = sum(len(c.prompt_token_ids) for c in prompts), sum(len(c.token_ids) for c in done)
    ttft = _median([c.timings.ttft * 1e3 for c in done if c.token_ids], "TTFT {:.1f} ms")
    tpot = _median([c.timings.tpot * 1e3 for c in done if len(c.token_ids) > 1], "{:.2f} ms per token")
    cached = sum(c.timings.cached_tokens for c in done)
    return (
        f"{tokens_in} tokens in, {tokens_out} out | {ttft}{tpot}"
        f"{tokens_out / seconds:.0f} tokens/s | {cached} cached | {padding:.0%} padding"
    )


def _median(values: list[float], text: str) -> str:
    return text.format(statistics.median(values)) + " | " if values else ""


if __name__ == "__main__":
    sys.exit(main())
