"""Prompts that are handed over: bytes against counts by hand and against what an engine exports,
seconds by hand.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.config import EngineOptions
from jaxserve.loading.spec import read_spec
from jaxserve.models.layer_kind import Latent, LayerKind, windowed
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.__main__ import main
from jaxserve.plan.deployment import Deployment, Target, deploy
from jaxserve.plan.estimate import Estimate
from jaxserve.plan.handover import Handover, Trip, arrival, lengths, parts_of
from jaxserve.plan.roofline import Case
from jaxserve.plan.topology import Limits, parse
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.test_page_exchange import GOLDEN, OPTIONS, House, Side

BF16 = jnp.dtype("bfloat16")
# L 3, N 4, K 2, H 8.
SPEC = ModelSpec("llama", 128, 32, 3, 4, 2, 8, 48, 1e-5, 4096)
WINDOWED = replace(SPEC, layers=windowed([20, None, 20]))
LATENT = replace(
    SPEC,
    num_kv_heads=1,
    head_dim=12,
    layers=(LayerKind(latent=Latent(None, rank=16, head=8, rotated=4, value=8)),) * 3,
)
SIZES = EngineOptions(
    max_batch=4, step_tokens=40, page_size=16, cache_tokens=16384, max_context=2000
)
FLAGS = ("--model", "llama3.1-8b", "--no-compile", "--topology")


def deployed(spec: ModelSpec = SPEC, tensor: int = 1, options: EngineOptions = SIZES) -> Deployment:
    axes = MeshSpec(tensor=tensor)
    return deploy(
        Target("random", spec, parse(f"h200x{tensor}"), options), axes, BF16, footprint=None
    )


@pytest.mark.parametrize(
    ("tokens", "pages"), [(100, 6), (97, 6), (96, 5), (17, 1), (16, 0), (1, 0)]
)
def test_whole_pages_travel_and_not_the_last_token(tokens: int, pages: int) -> None:
    """K and V of 2 heads of 8 numbers in 3 layers, of 16 tokens a page."""
    assert parts_of(deployed(), tokens, [tokens]) == [pages * 16 * 3 * 2 * 2 * 8 * 2]


def test_parts_follow_the_chunks() -> None:
    """After 40, 80 and 100 tokens there are 2, 5 and 6 whole pages."""
    page = 16 * 3 * 2 * 2 * 8 * 2
    assert parts_of(deployed(), 100, [40, 80, 100]) == [2 * page, 3 * page, page]


def test_copies_of_kv_heads_do_not_travel() -> None:
    one, four = (parts_of(deployed(tensor=tensor), 100, [40, 80, 100]) for tensor in (1, 4))
    assert deployed(tensor=4).spec.kv_copies == 2 and four == one


def test_of_a_window_what_the_last_token_sees() -> None:
    """Token 96 sees those from 77 on: pages 4 and 5 of two layers, the first when 80 are computed;
    all of the third.
    """
    page = 16 * 2 * 2 * 8 * 2
    found = parts_of(deployed(WINDOWED), 100, [40, 80, 100])
    assert found == [2 * page, 3 * page + 2 * page, page + 2 * page]


def test_latent_pages() -> None:
    """One vector of 16 + 4 numbers for a token and layer."""
    assert parts_of(deployed(LATENT), 100, [100]) == [96 * 3 * 20 * 2]


@pytest.mark.parametrize(
    ("spec", "token"), [(SPEC, 2 * 2 * (8 + 4)), (LATENT, 20 + 4)], ids=["heads", "latent"]
)
def test_pages_of_8_bits_have_scales(spec: ModelSpec, token: int) -> None:
    assert parts_of(deployed(spec, options=replace(SIZES, kv="int8")), 100, [100]) == [
        96 * 3 * token
    ]


@pytest.mark.parametrize(
    ("case", "mesh", "kv"),
    [
        ("gpt_oss_head_dim", (1, 1, 4), "int8"),  # windows, two copies of each kv head, scales
        ("qwen3_5", (1, 1, 2), "auto"),  # a state behind the last page
        pytest.param("llama_gqa", (1, 1, 1), "auto", marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", (1, 1, 1), "auto", marks=pytest.mark.slow),  # latent
    ],
)
def test_an_engine_exports_as_much(case: str, mesh: tuple[int, int, int], kv: str) -> None:
    house = House(case, Side(mesh, kv=kv))
    pieces = house.pieces("prefill", 0, 4)
    tokens = len(house.prompt)
    house.engine.close()
    spec = read_spec(HFCheckpoint.open(GOLDEN / case).config)[1]
    axes = MeshSpec(*mesh)
    options = replace(OPTIONS, kv=kv, snapshot_share=0.8 if spec.state else None)
    target = Target(case, spec, parse(f"cpux{axes.size}"), options)
    plan = deploy(target, axes, jnp.dtype("float32"), footprint=None)
    assert parts_of(plan, tokens, [tokens]) == [sum(piece.nbytes for piece in pieces)] != [0]


def test_parts_arrive_one_after_the_other() -> None:
    assert arrival([1, 2, 3], [0.5, 0.5, 0.5]) == 3.5, "the link waits for each"
    assert arrival([1, 2, 3], [2, 2, 2]) == 7, "it lags behind from the first on"
    assert arrival([1, 2, 3], [1.5, 0.5, 0.25]) == 3.25, "it has caught up"
    assert arrival([1, 2, 3], [2, 0.5, 0]) == 3.5, "the last step has nothing to send"


def test_lengths_double_up_to_the_longest() -> None:
    assert list(lengths(2000)) == [512, 1024, 2000]
    assert list(lengths(512)) == [512] and list(lengths(60)) == [60]


LIMITS = Limits(bandwidth=1e9, flops=1e10)


def test_a_trip_by_hand() -> None:
    """512 tokens: 12 chunks of 40 and one of 32 alone; of 37 beside three streams there, 14. 496
    tokens travel.
    """
    plan = deployed()
    estimate = Estimate(plan, 64, LIMITS)

    def seconds(*cases: Case) -> float:
        return plan.work(*cases).floor(LIMITS)

    streams = Case("decode", 3, 64, 3)
    fast, slow = (Handover(estimate, LIMITS, link).trips[0] for link in (1e15, 1e3))
    alone = [seconds(Case("prefill", 1, i * 40, min(40, 512 - i * 40))) for i in range(13)]
    there = [seconds(Case("prefill", 1, i * 37, min(37, 512 - i * 37)), streams) for i in range(14)]
    tail = seconds(Case("prefill", 1, 496, 16), streams)
    assert fast.prefill == pytest.approx(sum(alone)) and fast.steps == 14 and fast.tail == tail
    assert fast.added == pytest.approx(tail) and fast.slowest == max(there)
    assert fast.spared == pytest.approx(
        sum(there) - 14 * seconds(streams) - (tail - seconds(streams))
    )
    assert fast.spared > 0 and fast.hidden == pytest.approx(12 / 13, abs=0.05)
    nbytes = 496 * 3 * 2 * 2 * 8 * 2
    assert slow.nbytes == nbytes and slow.transfer == pytest.approx(nbytes / 1e3)
    assert slow.added == pytest.approx(alone[0] + nbytes / 1e3 + tail - sum(alone)), (
        "from the first chunk on it is busy"
    )


def test_a_step_with_a_chunk_and_streams() -> None:
    """Weights once, attention of each, and an embedding's row for every token; the logits of four
    rows are sent.
    """
    plan = deployed(replace(SPEC, head_dim=64), tensor=2)
    assert not plan.references
    chunk = Case("prefill", 1, 80, 40)
    streams = Case("decode", 3, 64, 3)
    both = plan.work(chunk, streams)
    one = plan.work(chunk)
    other = plan.work(streams)
    assert both.flops == one.flops + other.flops
    position, row = (
        3 * 2 * 64 * 2,
        32 * 2 / 2,
    )  # bytes of one of the heads, and of half of the embedding's row
    weights = plan.work(Case("decode", 1, 64, 1)).bytes - 65 * position - row
    assert both.bytes == weights + 43 * row + (120 + 3 * 65) * position
    assert plan.sent(chunk, streams) == plan.sent(chunk) + plan.sent(streams)


def test_lanes_share_the_link() -> None:
    axes = MeshSpec(data=2)
    plan = deploy(Target("random", SPEC, parse("h200x2"), SIZES), axes, BF16, footprint=None)
    two, one = (
        Handover(Estimate(each, 64, LIMITS), LIMITS, 1e6).trips[-1] for each in (plan, deployed())
    )
    assert two.nbytes == one.nbytes and two.transfer == pytest.approx(2 * one.transfer)


def test_nobody_else_is_spared_anything() -> None:
    alone = Handover(
        Estimate(deployed(options=replace(SIZES, max_batch=1)), 64, LIMITS), LIMITS, 1e15
    )
    assert alone.streams == 0 and alone.tpot == 0 and {trip.spared for trip in alone.trips} == {0}
    assert alone.pays_from is None


def test_what_pays() -> None:
    """A trip that pays adds at most a tenth of the prefill, and less than it spares."""
    trip = Trip(
        512, 1, transfer=1, prefill=10, arrival=10.5, tail=0.25, steps=3, slowest=1, spared=2
    )
    assert trip.added == 0.75 and trip.hidden == 0.5 and trip.pays
    assert not replace(trip, arrival=11).pays and not replace(trip, spared=0.75).pays
    assert replace(trip, arrival=9).hidden == 1


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main((*FLAGS, *flags, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A token of Llama 3.1 8B takes 128 KiB; the longer a prompt, the more its trip pays."""
    found = told(capsys, "h200", "--link", "25")
    handover = found["handover"]
    assert handover["link"] == 25e9 and handover["streams"] == 15 and found["memory"]["pieces"] > 0
    prompts = {prompt["tokens"]: prompt for prompt in handover["prompts"]}
    assert list(prompts) == [512 * 2**i for i in range(9)]
    assert prompts[2048]["bytes"] == (2048 - 64) * 2**17
    assert prompts[2048]["transfer"] == pytest.approx((2048 - 64) * 2**17 / 25e9)
    assert prompts[2048]["prefill"] == pytest.approx(found["floors"]["ttft"])
    paying = [tokens for tokens, prompt in prompts.items() if prompt["pays"]]
    assert handover["pays_from"] == paying[0] > 512 and paying == [
        t for t in prompts if t >= paying[0]
    ]
    slower = told(capsys, "h200", "--link", "0.1")["handover"]
    assert slower["pays_from"] is None
    pairs = zip(handover["prompts"], slower["prompts"], strict=True)
    assert all(slow["added"] > quick["added"] for quick, slow in pairs)
    without = told(capsys, "h200")
    assert without["handover"] is None and without["memory"]["pieces"] == 0


@pytest.mark.parametrize(
    ("link", "verdict"),
    [("25", "It pays from "), ("0.1", "It does not pay at this link: at 131,072")],
)
def test_the_table(link: str, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*FLAGS, "h200", "--link", link)) == 0
    out = capsys.readouterr().out
    assert f"at {link} GB/s" in out and verdict in out and "of stall" in out
    assert re.search(r"^ +2,048 +260\.0 ", out, re.MULTILINE) and "neither is forecast" in out


@pytest.mark.parametrize("link", ["0", "-1", "nan", "inf", "fast"])
def test_links_that_are_none_are_one_line(link: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main((*FLAGS, "h200", f"--link={link}"))
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith(
        f"error: argument --link: '{link}' is not a finite number above 0"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("cpu",), "--link needs the speed of cpu, which is not published"),
        (("h200", "--suggest"), "--suggest has no use for --link (leave --link out)"),
        (("h200", "--suggest=0"), "--suggest has no use for --link (leave --link out)"),
        (("h200", "--deterministic"), "--deterministic is given; pages of another engine"),
        (("h200", "--no-prefix-cache"), "--no-prefix-cache is given; pages of another engine"),
    ],
)
def test_what_cannot_be_handed_over(
    flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*FLAGS, *flags, "--link", "25")) == 2
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1


def test_a_model_that_embeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (GOLDEN / "qwen3_embedding").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert (tmp_path / "modules.json").exists()
    assert (
        main(("--model", str(tmp_path), "--no-compile", "--topology", "h200", "--link", "25")) == 2
    )
    err = capsys.readouterr().err
    assert (
        f"--link is for servers that generate, and {tmp_path.name} embeds" in err
        and err.count("\n") == 1
    )
