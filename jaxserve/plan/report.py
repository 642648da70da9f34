"""An estimate as tables for people, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.memory import HOST_SHARE, state_sizes
from jaxserve.engine.device.weight_report import weight_sizes
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.estimate import Batch, Estimate
from jaxserve.plan.handover import Handover
from jaxserve.plan.handover_report import handover_json, handover_parts
from jaxserve.plan.topology import Limits
from jaxserve.sharding.mesh import device_kind

GIB = 2**30


def show(estimate: Estimate, console: Console) -> None:
    """Print the tables."""
    for part in _parts(estimate):
        console.print(part, soft_wrap=True)


def _parts(estimate: Estimate) -> Iterator[RenderableType]:
    yield from introduction(estimate.deployment)
    yield _memory(estimate)
    yield verdict(estimate)
    if estimate.deployment.config.states:
        yield _states(estimate)
    if estimate.limits:
        yield from _times(estimate, estimate.limits)
    handover = handover_of(estimate)
    if handover:
        yield from handover_parts(handover)
    yield _counted(estimate)
    if estimate.steps:
        yield _compiled(estimate)
    yield _compiling(estimate)


def handover_of(estimate: Estimate) -> Handover | None:
    """Return what handing prompts over comes to; None without --link."""
    if not (estimate.limits and estimate.link):
        return None
    return Handover(estimate, estimate.limits, estimate.link)


def introduction(d: Deployment) -> Iterator[str]:
    """Yield lines about model, mesh and engine."""
    copies = f", every kv head on {d.spec.kv_copies} devices" if d.spec.kv_copies > 1 else ""
    axes = f"data {d.axes.data} x expert {d.axes.expert} x tensor {d.axes.tensor}"
    yield (
        f"model    {d.target.model} ({d.spec.family}), {d.parameters / 1e6:,.1f} M parameters, "
        f"{d.weights}"
    )
    yield f"mesh     {axes} on {d.topology.count} {device_kind(d.mesh)} ({d.topology.name}){copies}"
    config = d.config
    yield (
        f"engine   {config.max_batch} rows, {config.step_tokens} tokens a step, context "
        f"{config.max_context}, {len(d.buckets)} steps, attention {config.attention}"
    )
    if d.references:
        yield f"no kernel for {', '.join(d.references)}: counted as the references move bytes"


def _memory(estimate: Estimate) -> Table:
    table = _table("memory of one device", "GiB")
    table.add_column("")
    for what, size, note in memory_rows(estimate):
        table.add_row(what, f"{size / GIB:.3f}", note)
    return table


def memory_rows(estimate: Estimate) -> Iterator[tuple[str, int, str]]:
    """Yield name, bytes of one device and a note for each row of the table of memory."""
    d = estimate.deployment
    budget = estimate.budget
    pools = ", ".join(f"{pool.pages:,}" for pool in d.config.page_pools)
    slots = f", {d.config.slots:,} slots of states" if d.config.slots else ""
    pages = f"{pools} pages of {d.config.page_size} in {d.config.kv}{slots}"
    tokens = f"{estimate.lane_tokens:,} tokens a lane, {estimate.device_tokens:,.0f} a device"
    counted = "of the step with the most" if estimate.steps else "counted, not compiled"
    loaded = "all of them loaded" if budget.programs else "not known"
    yield "programs may use", budget.limit, _of_whole(d)
    yield "weights", budget.weights, ""
    for part, held in weight_sizes(d.params).items():
        formats = ", ".join(f"{dtype} {size / GIB:.3f}" for dtype, size in held.items())
        yield f"  {part}", sum(held.values()), formats
    yield "state: rows", budget.rows, f"{d.config.max_batch} a lane, {d.config.lanes} lanes"
    yield "state: pages", estimate.cache, f"{pages}: {tokens}"
    yield "temporaries", budget.temporaries, counted
    yield "compiled steps", budget.programs, loaded
    if budget.transit:
        yield "pieces", budget.transit, "of pages on their way from and to other engines"
    if estimate.padding:
        yield "padding", estimate.padding, "of arrays to the tiles of the chip, and a step's upload"
    yield "free", estimate.spare, ""


def _of_whole(d: Deployment) -> str:
    chip = d.topology.chip
    if chip is None:
        return f"{HOST_SHARE:.0%} of this machine's, shared out over the devices"
    whole = f"of {chip.memory / GIB:.1f}"
    if chip.usable is not None:
        return f"{whole}, as libtpu says"
    return f"{whole}, as jax takes of a GPU (--memory-fraction)"


def verdict(estimate: Estimate) -> str:
    """Return the sentence that says whether the model fits."""
    if estimate.fits:
        pages = (
            f"{estimate.cache / GIB:.2f} GiB of every device hold pages for "
            f"{estimate.lane_tokens:,} tokens a lane"
        )
        return f"It fits: {pages}, {estimate.spare / GIB:.2f} GiB stay free."
    return f"It does not fit: every device lacks {-estimate.spare / GIB:.2f} GiB."


def _states(estimate: Estimate) -> str:
    """Return what a snapshot takes, and what it costs to compute its tokens again."""
    d = estimate.deployment
    assert d.config.states
    (size,) = state_sizes(d.spec)
    text = (
        f"A slot of states takes {size.slot_bytes / 1e6:,.1f} MB on all of its devices together, "
        f"as the pages of {size.tokens(d.config.kv):,} tokens do; {d.config.max_batch} are for the "
        f"sequences of a lane, {d.config.slots - d.config.max_batch:,} for snapshots."
    )
    interval = min(d.config.states.interval, d.config.max_context)
    if d.config.slots == d.config.max_batch or not (interval and estimate.limits):
        return text
    seconds = estimate.prompt(estimate.limits, interval)
    return (
        f"{text} Computing {interval:,} tokens again, which a snapshot of a long prompt saves "
        f"(--snapshot-interval), takes {seconds * 1e3:,.1f} ms at least."
    )


def _times(estimate: Estimate, limits: Limits) -> Iterator[RenderableType]:
    speed = (
        f"{limits.bandwidth / 1e9:,.0f} GB/s and {limits.flops / 1e12:,.0f} TFLOP/s (ridge: "
        f"{limits.ridge:.0f} a byte)"
    )
    scheme = estimate.deployment.scheme
    if scheme and scheme.activations:
        speed += f", {getattr(limits, scheme.numbers) / 1e12:,.0f} of {scheme.numbers},"
    ttft = estimate.ttft(limits) * 1e3
    tpot = estimate.tpot(limits, 1) * 1e3
    yield f"\nFloors with {speed} in each device, at a context of {estimate.context}:"
    yield f"TTFT {ttft:.2f} ms, TPOT {tpot:.3f} ms for one stream in a lane."
    prompt = estimate.prompt_rate(limits)
    usd = estimate.usd(prompt)
    cost = "" if usd is None else f", {usd:.3f} USD for a million of them"
    yield f"Prompts: at most {prompt:,.0f} tokens a second{cost}."
    table = _table("rows", "streams", "TPOT floor, ms", "sending, ms", "tokens/s, ceiling")
    if estimate.price is not None:
        table.add_column("USD a million, at the ceiling", justify="right")
    table.add_column("")
    for batch in estimate.batches(limits):
        table.add_row(*_batch_cells(batch))
    yield table
    yield (
        "A ceiling is no forecast: what devices send each other, launches and activations are "
        "not in it."
    )


def _batch_cells(batch: Batch) -> Iterator[str]:
    yield from (f"{batch.rows:,}", f"{batch.streams:,}", f"{batch.tpot * 1e3:.3f}")
    yield from (f"{batch.exchange * 1e3:.3f}", f"{batch.tokens_per_second:,.0f}")
    if batch.usd is not None:
        yield f"{batch.usd:.3f}"
    yield "" if batch.held else "more than the cache holds"


def _counted(estimate: Estimate) -> Table:
    """Table of the least that every step reads and computes."""
    columns = ["step", "MB read", "GFLOP", "FLOP a byte"]
    table = _table(*columns, *(("bound by", "floor, ms", "sending, ms") if estimate.limits else ()))
    for bucket in estimate.deployment.buckets:
        table.add_row(str(bucket), *_counted_cells(estimate, bucket))
    return table


def _counted_cells(estimate: Estimate, bucket: Bucket) -> Iterator[str]:
    work = estimate.work(bucket)
    yield from (f"{work.bytes / 1e6:,.0f}", f"{work.flops / 1e9:,.1f}", f"{work.intensity:,.1f}")
    if estimate.limits:
        floor = work.floor(estimate.limits)
        yield "products" if work.multiplying(estimate.limits) == floor else "memory"
        yield f"{floor * bucket.steps * 1e3:.3f}"
        yield f"{estimate.exchange(bucket) * 1e3:.3f}"


def _compiled(estimate: Estimate) -> Table:
    """Table of what the compiler says of every step."""
    table = _table("step", "temporaries, MiB", "copies", "compiled in, s")
    table.add_column("sent by a device in a launch")
    for name, step in estimate.steps.items():
        found = step.found
        sent = ", ".join(
            f"{n} {op} {found.sent[op] / 1e6:,.1f} MB" for op, n in found.collectives.items()
        )
        temporaries = f"{found.temporaries / 2**20:,.1f}"
        copies = str(len(found.copies) or "none")
        table.add_row(name, temporaries, copies, f"{step.seconds:.1f}", sent or "nothing")
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, box=SIMPLE_HEAD)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _compiling(estimate: Estimate) -> str:
    if not estimate.steps:
        return "Nothing was compiled: what steps take beside weights and state is an estimate."
    seconds = sum(step.seconds for step in estimate.steps.values())
    return f"{len(estimate.steps)} steps and writers of rows compiled in {seconds:,.0f} s."


def to_json(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate in bytes, seconds, FLOP and USD; memory and work are of one device."""
    d = estimate.deployment
    limits = estimate.limits
    handover = handover_of(estimate)
    return {
        "model": d.target.model,
        "family": d.spec.family,
        "parameters": d.parameters,
        "weights": d.weights,
        "kv": d.config.kv,
        "topology": d.topology.name,
        "devices": d.topology.count,
        "reference": d.references,
        "chips": d.topology.chips,
        "mesh": asdict(d.axes),
        "fits": estimate.fits,
        "memory": _memory_json(estimate),
        "cache": {
            "pages": [pool.pages for pool in d.config.page_pools],
            "slots": d.config.slots,
            "page_size": d.config.page_size,
            "tokens_per_lane": estimate.lane_tokens,
            "tokens_per_device": estimate.device_tokens,
        },
        "context": estimate.context,
        "chip": limits and asdict(limits) | {"ridge": limits.ridge},
        "floors": limits and {"ttft": estimate.ttft(limits), "tpot": estimate.tpot(limits, 1)},
        "prompt_tokens_per_second": limits and estimate.prompt_rate(limits),
        "batches": [vars(batch) for batch in estimate.batches(limits)] if limits else None,
        "handover": handover and handover_json(handover),
        "steps": [_step_json(estimate, bucket) for bucket in d.buckets],
        "seconds_of_compiling": sum(step.seconds for step in estimate.steps.values()),
    }


def _memory_json(estimate: Estimate) -> dict[str, Any]:
    budget = estimate.budget
    return {
        "limit": budget.limit,
        "weights": budget.weights,
        "parts": weight_sizes(estimate.deployment.params),
        "rows": budget.rows,
        "pages": estimate.cache,
        "pieces": budget.transit,
        "temporaries": budget.temporaries,
        "programs": budget.programs,
        "spare": estimate.spare,
        "padding": estimate.padding,
        "compiled": bool(estimate.steps),
    }


def _step_json(estimate: Estimate, bucket: Bucket) -> dict[str, Any]:
    work = estimate.work(bucket)
    name = str(bucket)
    counted = {
        "step": name,
        "bytes": work.bytes,
        "flops": work.flops,
        "flops_per_byte": work.intensity,
        "floor": work.floor(estimate.limits) * bucket.steps if estimate.limits else None,
        "exchange": estimate.exchange(bucket) if estimate.limits else None,
    }
    if name not in estimate.steps:
        return counted
    step = estimate.steps[name]
    return counted | asdict(step.found) | {"seconds": step.seconds}
