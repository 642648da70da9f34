"""Charts are well-formed, and points lie where they should."""

from xml.etree import ElementTree

from jaxserve.plan.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes, Chart, Line, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_axes() -> None:
    """x up to 37 gets an axis to 40, y of 3 to 80 one from 1 to 100, on which 10 lies in the
    middle.
    """
    axes = Axes.around([(10, 3), (37, 80)])
    assert axes == Axes(10, 40, 1, 100)
    assert (axes.x(0), axes.x(40)) == (LEFT, WIDTH - RIGHT)
    assert (axes.y(1), axes.y(10), axes.y(100)) == (
        HEIGHT - BOTTOM,
        (HEIGHT - BOTTOM + TOP) / 2,
        TOP,
    )
    assert axes.x_ticks() == [0, 10, 20, 30, 40]
    assert axes.y_ticks() == [1, 2, 5, 10, 20, 50, 100]


def test_axes_of_little() -> None:
    assert Axes.around([]).right == 1
    assert Axes.around([(0, 10)]) == Axes(0.2, 1, 10, 100)


def test_picture() -> None:
    lines = [
        Line("fast & small p50", "fast & small", [(10, 3), (37, 80)]),
        Line("fast & small p99", "fast & small", [(10, 6)], dashed=True),
        Line("other p50", "other", []),
    ]
    root = ElementTree.fromstring(
        picture([Chart("first", "tok/s", "ms", lines), Chart("second", "x", "y", lines[:1])])
    )
    drawn = root.findall(f".//{SVG}polyline")
    assert len(drawn) == 4
    assert drawn[0].get("stroke") == drawn[1].get("stroke") != drawn[2].get("stroke")
    assert [bool(line.get("stroke-dasharray")) for line in drawn] == [False, True, False, False]
    assert drawn[2].get("points") == ""
    assert len(root.findall(f".//{SVG}circle")) == 5
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"first", "second", "tok/s", "ms"} <= set(texts)
    assert [texts.count(line.name) for line in lines] == [1, 1, 1]
