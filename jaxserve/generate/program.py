"""Work of `jaxserve generate`, once its arguments are known to be right."""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from rich.console import Console

from jaxserve.chat.conversation import Conversation
from jaxserve.checkpoints.hub.names import display_name
from jaxserve.cli.checks import check_file
from jaxserve.cli.exits import BAD_INPUT, complain
from jaxserve.cli.flags import draft_model_of
from jaxserve.cli.inputs import is_typed, read_prompts, read_turns
from jaxserve.cli.output import JsonPrinter, TextPrinter, model_line, summary
from jaxserve.cluster.agreement import READS_ALL, agree_on_engine, digests_to_compare
from jaxserve.cluster.bootstrap import Pod, SingleHost, join
from jaxserve.cluster.compatibility import facts_of_start
from jaxserve.cluster.hosts import Hosts, leave
from jaxserve.cluster.hub_model import model_of_pod
from jaxserve.compilation_cache import use_compilation_cache
from jaxserve.completion import Completion, Delta
from jaxserve.engine.device.weight_report import describe_rounding, describe_weights, weight_sizes
from jaxserve.errors import RequestError
from jaxserve.generate.batch_files import BatchOutput, check_batch_file
from jaxserve.generate.flags import GenerateOptions
from jaxserve.interrupts import interrupts_raise
from jaxserve.llm import LLM
from jaxserve.models.precision import AS_STORED
from jaxserve.progress import Bar
from jaxserve.prompts import Prepared
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec, device_kind
from jaxserve.sharding.params import stored_bytes

if TYPE_CHECKING:
    from jaxserve.cluster.leader import Leader


def generate(
    options: GenerateOptions, hosts: Hosts, params: SamplingParams, prompts: list[str] | None
) -> int:
    """Load the checkpoint, generate for the prompts or turns, and return the exit code.

    Args:
        prompts: Prompts, or turns that flags give; None where they are still to be read, by the
            host that leads.
    """
    console = Console(stderr=True, highlight=False)
    with join(hosts) as pod:
        chat = options.conversation.chat
        batch = options.batch.batch_file
        given = options.given_prompts
        file = options.prompts.prompts_file
        if prompts is None:
            prompts = read_prompts(given, file) if pod.leads and not (chat or batch) else []
        turns: Iterable[str] = []
        if pod.leads and chat:
            mark = "" if options.prompts.json else "> "
            turns = prompts or read_turns(given, file, mark)
        options = replace(options, model=model_of_pod(pod, options.model))
        use_compilation_cache(options.engine.compilation_cache)
        with ExitStack() as resources:
            output = None
            lines = 0
            if pod.leads and batch and options.batch.output:
                check_file("--batch-file", batch)
                check_batch_file(batch)
                output = resources.enter_context(BatchOutput(options.batch.output))
                lines = output.count_lines(batch)
            llm = resources.enter_context(open_llm(options, console, pod))
            introduce(llm, options, console)
            if pod.leads is False:  # the other hosts of a pod run the leader's steps
                return pod.follow(llm.runner)
            tracing = llm.trace(options.trace) if options.trace else nullcontext()
            with interrupts_raise(), tracing:
                if batch and output:
                    return answer_batch(llm, batch, output, lines, options, console, pod)
                if chat:
                    return talk(llm, turns, params, options, console)
                return run(llm, prompts, params, options, console)


def open_llm(options: GenerateOptions, console: Console, pod: Pod) -> LLM:
    """Load the checkpoint as the options say, after all hosts of the pod agreed on them."""
    loading = Bar(console, "loading", in_bytes=True)
    compiling = Bar(console, "compiling")
    engine = options.engine
    mesh = MeshSpec(**engine.axes)
    # Hosts that differ would wait for each other in a collective without end.
    facts = partial(facts_of_start, mesh, engine.dtype, engine.weights, engine.options)
    pod.agree("start", facts)
    digests = digests_to_compare(pod, options.model)
    if digests and digests.all_hosts:
        console.print(READS_ALL, soft_wrap=True, markup=False)
    with loading:
        llm = LLM(
            options.model,
            dtype=engine.dtype,
            weights=engine.weights,
            product=engine.product,
            options=engine.options,
            mesh=mesh,
            chat_template=options.conversation.chat_template,
            # Lines of a file are answered as a server answers requests.
            unknown_fields="ignore" if options.batch.batch_file else "error",
            draft_model=draft_model_of(engine, options.hosts),
            on_load=loading.update,
            on_compile=compiling.update,
            new_runner=pod.new_runner,
            compilation_cache=None,  # the command has chosen one
            digests=digests,
        )
    agree_on_engine(pod, llm.model, llm.runner.config, digests)
    return llm


def introduce(llm: LLM, options: GenerateOptions, console: Console) -> None:
    """Print what runs and where, and tokens that the model does not have.

    With --verbose, also what its memory holds.
    """
    model = llm.model
    precision = model.weights
    if precision == AS_STORED:
        precision = model.dtype
    lines = [
        model_line(
            display_name(options.model),
            model.parameters,
            precision,
            sum(stored_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model.params)),
            device_kind(model.mesh),
            model.mesh.size,
        )
    ]
    if options.verbose:
        sizes = weight_sizes(model.params)
        lines.append("weights " + describe_weights(sizes))
        lines.append(f"products by {model.product_text}")
        if model.product and (hint := describe_rounding(sizes)):  # with the CPU's kernel
            lines.append(hint)
    if options.verbose and llm.draft:
        lines.append("draft model " + describe_weights(weight_sizes(llm.draft.params)))
    for line in (*lines, *model.notes, *llm.token_notes):
        console.print(line, style="dim", soft_wrap=True, markup=False)


def run(
    llm: LLM, prompts: list[str], params: SamplingParams, options: GenerateOptions, console: Console
) -> int:
    """Generate for every prompt that can run, and print one error line for each other prompt."""
    prepared: list[Prepared] = []
    numbers: list[int] = []  # position of each prepared prompt among all prompts
    code = 0
    for number, prompt in enumerate(prompts):
        name = f"prompt {number + 1}" if len(prompts) > 1 else "prompt"
        try:
            prepared.append(llm.prepare(prompt, params, name))
            numbers.append(number)
        except RequestError as error:
            code = complain(error)
    printer: JsonPrinter | TextPrinter
    if options.prompts.json:
        printer = JsonPrinter(llm.model.tokenizer)
    else:
        shown = [] if params.echo else prompts  # an echo has its prompt already
        printer = TextPrinter(alone=len(prompts) * params.n == 1, prompts=shown)
    llm.steps.compile_first(prepared)
    started = time.monotonic()  # the summary's rates leave out what the first step waits for
    done: list[Completion] = []
    order = [(i, k) for i in range(len(prepared)) for k in range(params.n)]
    for delta in _in_order(llm.run(prepared), order):
        printer.show(numbers[delta.prompt_index], delta)
        if delta.completion:
            done.append(delta.completion)
            if delta.completion.error:
                code = complain(delta.completion.error)
    print_summary(llm, done, time.monotonic() - started, options, console)
    return code


def answer_batch(
    llm: LLM,
    batch: Path,
    output: BatchOutput,
    lines: int,
    options: GenerateOptions,
    console: Console,
    pod: "SingleHost | Leader",
) -> int:
    """Answer the requests of a file of so many lines, and return the exit code."""
    # The server's packages take time to import.
    from jaxserve.generate.batch import FAILED, run_batch

    name = options.batch.served_model_name or display_name(options.model)
    code = run_batch(llm, name, batch, output, lines, console, pod)
    if code == FAILED and not isinstance(pod, SingleHost):
        pod.fail()
        leave(code)  # at once, as hosts that are gone would be waited for
    return code


def talk(
    llm: LLM,
    turns: Iterable[str],
    params: SamplingParams,
    options: GenerateOptions,
    console: Console,
) -> int:
    """Answer the turns of a conversation, each before the next is read.

    A turn that cannot be answered is reported and forgotten.
    """
    # Without a template this raises ChatError, before a person types the first turn.
    llm.chat_template  # noqa: B018
    for note in llm.chat_notes:
        console.print(note, style="dim", soft_wrap=True, markup=False)
    is_json = options.prompts.json
    printer = JsonPrinter(llm.model.tokenizer) if is_json else TextPrinter(alone=True)
    stream = partial(llm.stream, params=params, **options.conversation.template)
    typed = is_typed(options.given_prompts, options.prompts.prompts_file)
    system = options.conversation.system
    conversation = Conversation(stream, printer, complain, system, interactive=typed)
    conversation.run(turns)
    seconds = sum(completion.timings.total for completion in conversation.done)
    print_summary(llm, conversation.done, seconds, options, console)
    return BAD_INPUT if conversation.failed else 0


def print_summary(
    llm: LLM, done: list[Completion], seconds: float, options: GenerateOptions, console: Console
) -> None:
    """Print the last line, if anything is done; with --verbose, it has the share of padding."""
    if done:
        padding = llm.padding_share if options.verbose else None
        console.print(summary(done, seconds, padding), style="dim", soft_wrap=True)


def _in_order(deltas: Iterator[Delta], order: list[tuple[int, int]]) -> Iterator[Delta]:
    """Reorder deltas so that each choice is complete before the next one in `order` begins.

    The first unfinished choice is passed on as it grows; deltas of later ones wait.
    """
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
