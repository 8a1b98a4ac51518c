"""Charts are well-formed SVG whose points lie where the figures say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from semel.charts import Axis, Series, Span, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def points_of(chart: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(chart).iter(f"{SVG}polyline")
    return [
        [(float(x), float(y)) for x, y in (at.split(",") for at in line.get("points", "").split())] for line in lines
    ]


@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_larger_figures_lie_further_right_and_higher(is_logarithmic: bool) -> None:
    """On both kinds of axes, inside of the picture."""
    axis = Axis("a", is_logarithmic)
    (line,) = points_of(line_chart("t", [Series("s", [(1, 2), (10, 30), (1000, 40)])], x=axis, y=axis))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)
    assert all(0 <= x <= 720 and 0 <= y <= 300 for x, y in line)


def test_a_logarithmic_axis_gives_every_power_the_same_room() -> None:
    """1, 10, 100: equal steps."""
    axis = Axis("a", is_logarithmic=True)
    ((first, second, third),) = points_of(line_chart("t", [Series("s", [(1, 1), (10, 1), (100, 1)])], x=axis, y=axis))
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.2)


@pytest.mark.parametrize("points", [[], [(0, 0)], [(5, 5), (5, 5)], [(0, -1), (1, 1)]])
def test_few_equal_and_no_points_are_drawn_too(points: list[tuple[float, float]]) -> None:
    """Nothing divides by nothing, also where a logarithm has no value."""
    for is_logarithmic in (False, True):
        axis = Axis("a", is_logarithmic)
        ElementTree.fromstring(line_chart("t", [Series("s", points)], x=axis, y=axis))


def test_what_people_wrote_does_not_become_markup() -> None:
    """Names of topics and of faults come from outside."""
    span = Span(0, 1, "<kill> & pause")
    chart = line_chart("a < b", [Series("<s>", [(0, 0), (1, 1)])], x=Axis("<x>"), y=Axis("&"), spans=[span])
    titles = [title.text for title in ElementTree.fromstring(chart).iter(f"{SVG}title")]
    assert "a < b" in titles
    assert "<kill> & pause" in titles
