"""An account as tables for a person, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.memory import HOST_SHARE
from jaxserve.engine.device.weight_report import weight_sizes
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.estimate import Account, Batch
from jaxserve.plan.handover import Handover
from jaxserve.plan.handover_report import handover_json, handover_parts
from jaxserve.plan.roofline import Limits
from sharding.mesh import device_kind

GIB = 2**30


def show(account: Account, console: Console) -> None:
    for part in _parts(account):
        console.print(part, soft_wrap=True)


def _parts(account: Account) -> Iterator[RenderableType]:
    yield from _introduction(account.deployment)
    yield _memory(account)
    yield verdict(account)
    if account.limits:
        yield from _times(account, account.limits)
    if handover := handover_of(account):
        yield from handover_parts(handover)
    yield _counted(account)
    if account.steps:
        yield _compiled(account)
    yield _compiling(account)


def handover_of(account: Account) -> Handover | None:
    """Where there is a link to hand prompts over, and somebody publishes how fast the devices
    are."""
    return (
        Handover(account, account.limits, account.link) if account.limits and account.link else None
    )


def _introduction(d: Deployment) -> Iterator[str]:
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
        f"{config.max_context}, "
        f"{len(d.buckets)} steps, attention {config.attention}"
    )


def _memory(account: Account) -> Table:
    table = _table("memory of one device", "GiB")
    table.add_column("")
    for what, size, note in memory_rows(account):
        table.add_row(what, f"{size / GIB:.3f}", note)
    return table


def memory_rows(account: Account) -> Iterator[tuple[str, int, str]]:
    d, budget = account.deployment, account.budget
    pools = ", ".join(f"{pool.pages:,}" for pool in d.config.pools)
    tokens = f"{account.lane_tokens:,} tokens a lane, {account.device_tokens:,.0f} a device"
    counted = "of the step with the most" if account.steps else "counted, not compiled"
    yield "programs may use", budget.limit, _of_whole(d)
    yield "weights", budget.weights, ""
    for part, held in weight_sizes(d.params).items():
        yield (
            f"  {part}",
            sum(held.values()),
            ", ".join(f"{dtype} {size / GIB:.3f}" for dtype, size in held.items()),
        )
    yield "state: rows", budget.rows, f"{d.config.max_batch} a lane, {d.config.lanes} lanes"
    yield (
        "state: pages",
        account.cache,
        f"{pools} pages of {d.config.page_size} in {d.config.kv}: {tokens}",
    )
    yield "temporaries", budget.temporaries, counted
    yield (
        "compiled steps",
        budget.programs,
        "all of them loaded" if budget.programs else "not known",
    )
    if budget.transit:
        yield "pieces", budget.transit, "of pages on their way from and to other engines"
    if account.padding:
        yield "padding", account.padding, "of arrays to the tiles of the chip, and a step's upload"
    yield "free", account.spare, ""


def _of_whole(d: Deployment) -> str:
    chip = d.topology.chip
    if chip is None:
        return f"{HOST_SHARE:.0%} of this machine's, shared out over the devices"
    whole = f"of {chip.memory / GIB:.1f}"
    if chip.usable is not None:
        return f"{whole}, as libtpu says"
    return f"{whole}, as jax takes of a GPU (--memory-fraction)"


def verdict(account: Account) -> str:
    if account.fits:
        pages = (
            f"{account.cache / GIB:.2f} GiB of every device hold pages for "
            f"{account.lane_tokens:,} tokens a lane"
        )
        return f"It fits: {pages}, {account.spare / GIB:.2f} GiB stay free."
    return f"It does not fit: every device lacks {-account.spare / GIB:.2f} GiB."


def _times(account: Account, limits: Limits) -> Iterator[RenderableType]:
    speed = (
        f"{limits.bandwidth / 1e9:,.0f} GB/s and {limits.flops / 1e12:,.0f} TFLOP/s (ridge: "
        f"{limits.ridge:.0f} a byte)"
    )
    if (form := account.deployment.form) and form.activations:
        speed += f", {getattr(limits, form.numbers) / 1e12:,.0f} of {form.numbers},"
    ttft, tpot = account.ttft(limits) * 1e3, account.tpot(limits, 1) * 1e3
    yield f"\nFloors with {speed} in each device, at a context of {account.context}:"
    yield f"TTFT {ttft:.2f} ms, TPOT {tpot:.3f} ms for one stream in a lane."
    prompt = account.prompt_rate(limits)
    cost = "" if account.price is None else f", {account.usd(prompt):.3f} USD for a million of them"
    yield f"Prompts: at most {prompt:,.0f} tokens a second{cost}."
    table = _table("rows", "streams", "TPOT floor, ms", "sending, ms", "tokens/s, ceiling")
    if account.price is not None:
        table.add_column("USD a million, at the ceiling", justify="right")
    table.add_column("")
    for batch in account.batches(limits):
        table.add_row(*_batch_cells(batch))
    yield table
    yield (
        "A ceiling is no forecast: what devices send each other, launches and activations are "
        "not in it."
    )


def _batch_cells(batch: Batch) -> Iterator[str]:
    yield from (
        f"{batch.rows:,}",
        f"{batch.streams:,}",
        f"{batch.tpot * 1e3:.3f}",
        f"{batch.exchange * 1e3:.3f}",
    )
    yield f"{batch.tokens_per_second:,.0f}"
    if batch.usd is not None:
        yield f"{batch.usd:.3f}"
    yield "" if batch.held else "more than the cache holds"


def _counted(account: Account) -> Table:
    """What every step reads and computes at least."""
    columns = ["step", "MB read", "GFLOP", "FLOP a byte"]
    table = _table(*columns, *(("bound by", "floor, ms", "sending, ms") if account.limits else ()))
    for bucket in account.deployment.buckets:
        table.add_row(str(bucket), *_counted_cells(account, bucket))
    return table


def _counted_cells(account: Account, bucket: Bucket) -> Iterator[str]:
    work = account.work(bucket)
    yield from (f"{work.bytes / 1e6:,.0f}", f"{work.flops / 1e9:,.1f}", f"{work.intensity:,.1f}")
    if account.limits:
        yield (
            "products"
            if work.multiplying(account.limits) == work.floor(account.limits)
            else "memory"
        )
        yield f"{work.floor(account.limits) * bucket.steps * 1e3:.3f}"
        yield f"{account.exchange(bucket) * 1e3:.3f}"


def _compiled(account: Account) -> Table:
    """What the compiler says of every step."""
    table = _table("step", "temporaries, MiB", "copies", "compiled in, s")
    table.add_column("sent by a device in a launch")
    for name, step in account.steps.items():
        found = step.found
        sent = ", ".join(
            f"{n} {op} {found.sent[op] / 1e6:,.1f} MB" for op, n in found.collectives.items()
        )
        temporaries, copies = f"{found.temporaries / 2**20:,.1f}", str(len(found.copies) or "none")
        table.add_row(name, temporaries, copies, f"{step.seconds:.1f}", sent or "nothing")
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, box=SIMPLE_HEAD)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _compiling(account: Account) -> str:
    if not account.steps:
        return "Nothing was compiled: what steps take beside weights and state is an estimate."
    seconds = sum(step.seconds for step in account.steps.values())
    return f"{len(account.steps)} steps and writers of rows compiled in {seconds:,.0f} s."


def to_json(account: Account) -> dict[str, Any]:
    """Bytes, seconds, FLOP and USD; memory and work of one device."""
    d, limits, handover = account.deployment, account.limits, handover_of(account)
    return {
        "model": d.target.model,
        "family": d.spec.family,
        "parameters": d.parameters,
        "weights": d.weights,
        "kv": d.config.kv,
        "topology": d.topology.name,
        "devices": d.topology.count,
        "chips": d.topology.chips,
        "mesh": {"data": d.axes.data, "expert": d.axes.expert, "tensor": d.axes.tensor},
        "fits": account.fits,
        "memory": _memory_json(account),
        "cache": {
            "pages": [pool.pages for pool in d.config.pools],
            "page_size": d.config.page_size,
            "tokens_per_lane": account.lane_tokens,
            "tokens_per_device": account.device_tokens,
        },
        "context": account.context,
        "chip": limits and asdict(limits) | {"ridge": limits.ridge},
        "floors": limits and {"ttft": account.ttft(limits), "tpot": account.tpot(limits, 1)},
        "prompt_tokens_per_second": limits and account.prompt_rate(limits),
        "batches": [vars(batch) for batch in account.batches(limits)] if limits else None,
        "handover": handover and handover_json(handover),
        "steps": [_step_json(account, bucket) for bucket in d.buckets],
        "seconds_of_compiling": sum(step.seconds for step in account.steps.values()),
    }


def _memory_json(account: Account) -> dict[str, Any]:
    budget = account.budget
    return {
        "limit": budget.limit,
        "weights": budget.weights,
        "parts": weight_sizes(account.deployment.params),
        "rows": budget.rows,
        "pages": account.cache,
        "pieces": budget.transit,
        "temporaries": budget.temporaries,
        "programs": budget.programs,
        "spare": account.spare,
        "padding": account.padding,
        "compiled": bool(account.steps),
    }


def _step_json(account: Account, bucket: Bucket) -> dict[str, Any]:
    work, name = account.work(bucket), str(bucket)
    counted = {
        "step": name,
        "bytes": work.bytes,
        "flops": work.flops,
        "flops_per_byte": work.intensity,
        "floor": work.floor(account.limits) * bucket.steps if account.limits else None,
        "exchange": account.exchange(bucket) if account.limits else None,
    }
    if name not in account.steps:
        return counted
    step = account.steps[name]
    return counted | asdict(step.found) | {"seconds": step.seconds}
