"""The page of a plan: it has the numbers of the tables, and its drawings are well-formed."""

import re
from pathlib import Path
from xml.dom import minidom

import pytest

from jaxserve.plan.__main__ import main
from jaxserve.plan.estimate import Estimate
from jaxserve.plan.html_report import MISSING_COLOUR


def written(path: Path, *flags: str, code: int = 0) -> str:
    assert main([*flags, "--no-compile", "--html", str(path)]) == code
    return path.read_text()


def drawings(page: str) -> list[minidom.Document]:
    return [minidom.parseString(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


@pytest.mark.parametrize("topology", ["v6e:2x4", "h200x2"])
def test_the_memory_bar_is_full(tmp_path: Path, topology: str) -> None:
    page = written(tmp_path / "p.html", "llama3.1-8b", "--topology", topology)
    shares = [float(share) for share in re.findall(r'style="width: ([\d.]+)%', page)]
    assert sum(shares) == pytest.approx(100, abs=0.01)
    sizes = dict(re.findall(r'title="([\w: ]+): ([\d.]+) GiB"', page))
    assert {"weights", "state: rows", "state: pages", "temporaries", "free"} <= sizes.keys()
    assert float(sizes["weights"]) == pytest.approx(sum_of_weights(page), abs=0.01)


def sum_of_weights(page: str) -> float:
    """Return the GiB of 8.03 B parameters in bfloat16, over the devices of the mesh."""
    axes = re.search(r"data (\d+) x expert (\d+) x tensor (\d+)", page)
    assert axes
    return 8.030e9 * 2 / 2**30 / int(axes[3])


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "w8a8-int8"])
def test_steps_lie_on_the_roof(tmp_path: Path, weights: str) -> None:
    flags = ("llama3.1-8b", "--topology", "h200", "--weights", weights)
    page = written(tmp_path / "p.html", *flags)
    roofline, charts = drawings(page)
    assert charts.getElementsByTagName("polyline")
    titles = [
        title.firstChild.data  # type: ignore[union-attr]
        for title in roofline.getElementsByTagName("title")
    ]
    rows = re.findall(r"<tr><td>(\w+\[[^<]+)<td>([\d,.]+)<td>([\d,.]+)<td>([\d,.]+)", page)
    assert len(titles) == len(rows) > 10
    for (name, megabytes, _, intensity), title in zip(rows, titles, strict=True):
        assert title.startswith(f"{name}: {megabytes} MB, {intensity} FLOP/byte, ")
        rate = float(title.rsplit(", ", 1)[1].split()[0].replace(",", ""))
        slope = float(intensity.replace(",", "")) * 4.8  # TB/s of an H200
        assert rate <= min(slope * 1.02 + 0.1, 1979)
    assert {"memory", "products"} == set(re.findall(r"<td>(memory|products)$", page, re.M))


def test_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.html"
    flags = ("llama3.1-8b", "--topology", "v5e:1x1", "--weights", "bfloat16", "--no-compile")
    assert main([*flags, "--html", str(path)]) == 1
    assert "is not written: there is no estimate" in capsys.readouterr().err.replace("\n", " ")
    assert not path.exists()


def test_missing_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimate, "padding", 40 * 2**30)
    page = written(tmp_path / "p.html", "llama3.1-8b", "--topology", "v6e:2x4", code=1)
    assert MISSING_COLOUR in page and "every device lacks 40.00 GiB" in page
    shares = [float(share) for share in re.findall(r'style="width: ([\d.]+)%', page)]
    assert sum(shares) == pytest.approx(100, abs=0.01) and shares[-1] == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--topology", "cpu"), "--html needs the speed of cpu"),
        (("--topology", "h200", "--suggest"), "--suggest has no use for --html"),
        (("--topology", "h200", "--html", "/nowhere/p.html"), "no file can be written there"),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], problem: str
) -> None:
    path = () if "--html" in flags else ("--html", str(tmp_path / "p.html"))
    assert main(["llama3.1-8b", "--no-compile", *flags, *path]) == 2
    assert problem in capsys.readouterr().err
