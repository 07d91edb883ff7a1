import html
import json
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from ebbtide.observe.charts import Chart, Series, draw, is_constant

LEFT, RIGHT, TOP, BOTTOM = 52.0, 468.0, 10.0, 206.0  # the plot's edges in the drawing


def figure(*series: Series, **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(draw(Chart("T", options.pop("unit", ""), "S.", series, **options)))


def points(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in element.attrib["points"].split())]


def texts(element: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in element.iter("text")]


def hover(element: ElementTree.Element) -> Any:
    svg = element.find("svg")
    assert svg is not None
    return json.loads(svg.attrib["data-chart"])


def test_a_line_goes_through_its_points() -> None:
    drawn = figure(Series("a", [0, 5, 10], [0.0, 1.0, 0.5]))
    (line,) = drawn.iter("polyline")
    assert points(line) == [(LEFT, BOTTOM), (260.0, TOP), (RIGHT, 108.0)]
    assert texts(drawn) == ["0", "0.25", "0.50", "0.75", "1.00", "0", "2", "4", "6", "8", "10"]


def test_a_value_that_is_no_number_leaves_a_gap() -> None:
    drawn = figure(Series("a", [0, 1, 2, 3, 4, 5], [0, 1, math.nan, 1, 0, math.inf]))
    assert [len(points(line)) for line in drawn.iter("polyline")] == [2, 2]
    assert hover(drawn)["series"][0]["values"] == [0, 1, None, 1, 0, None]
    lone = figure(Series("a", [0, 1, 2], [1, math.nan, 2]))
    assert len(list(lone.iter("circle"))) == 2


def test_nothing_to_draw_gives_nothing() -> None:
    assert draw(Chart("T", "", "S.")) == ""
    assert draw(Chart("T", "", "S.", [Series("a", [], [])])) == ""
    assert draw(Chart("T", "", "S.", [Series("a", [1], [math.nan])])) == ""


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e12, 1e-12])
def test_one_point_and_a_flat_line_have_an_axis_around_them(value: float) -> None:
    for series in (Series("a", [7], [value]), Series("a", [1, 2], [value, value])):
        drawn = figure(series)
        marks = [*drawn.iter("circle"), *drawn.iter("polyline")]
        y = float(marks[0].get("cy") or points(marks[0])[0][1])
        assert TOP < y < BOTTOM


@pytest.mark.parametrize(
    ("unit", "values", "labels"),
    [
        ("bytes", [0, 3 * 2**30], ["0 GiB", "1 GiB", "2 GiB", "3 GiB"]),
        ("bytes", [0, 1536], ["0.0 KiB", "0.5 KiB", "1.0 KiB", "1.5 KiB"]),
        ("s", [0, 0.04], ["0 ms", "10 ms", "20 ms", "30 ms", "40 ms"]),
        ("s", [0, 4.0], ["0 s", "1 s", "2 s", "3 s", "4 s"]),
        ("ratio", [0, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        ("tokens/s", [0, 40_000], ["0k", "10k", "20k", "30k", "40k"]),
        ("", [-0.5, 0.5], ["-0.50", "-0.25", "0", "0.25", "0.50"]),
        ("", [0, 4e-6], ["0", "1e-6", "2e-6", "3e-6", "4e-6"]),
    ],
)
def test_the_axis_is_labelled_in_round_values_of_the_unit(unit: str, values: list[float], labels: list[str]) -> None:
    assert texts(figure(Series("a", [0, 1], values), unit=unit))[: len(labels)] == labels


def test_a_bound_widens_the_axis_and_never_narrows_it() -> None:
    assert texts(figure(Series("a", [0, 1], [0.4, 0.6]), unit="ratio", bounds=(0.0, 1.0)))[:5] == [
        "0 %", "25 %", "50 %", "75 %", "100 %",
    ]  # fmt: skip
    assert "-0.5" in texts(figure(Series("a", [0, 1], [-0.5, 0.6]), bounds=(0.0, None)))


def test_stacked_areas_lie_on_each_other() -> None:
    drawn = figure(
        Series("a", [0, 1], [1.0, 2.0]), Series("b", [0, 1], [1.0, 2.0]), is_stacked=True, bounds=(0.0, None)
    )
    lower, upper = (re.findall(r"[\d.]+ ([\d.]+)", path.attrib["d"]) for path in drawn.iter("path"))
    assert [float(y) for y in lower] == pytest.approx([157, 108, 206, 206])  # up along the top, back along the bottom
    assert [float(y) for y in upper] == pytest.approx([108, 10, 108, 157])
    assert [series["values"] for series in hover(drawn)["series"]] == [[1, 2], [1, 2]]


def test_a_stack_takes_what_is_not_there_as_nothing() -> None:
    drawn = figure(Series("a", [0, 1, 2], [1, math.nan, 1]), Series("b", [1], [3.0]), is_stacked=True)
    assert [series["values"] for series in hover(drawn)["series"]] == [[1, 0, 1], [0, 3, 0]]


def test_a_long_series_is_drawn_as_means_with_their_range() -> None:
    steps = list(range(4000))
    drawn = figure(Series("a", steps, [float(step % 10) for step in steps]))
    (line,) = drawn.iter("polyline")
    assert len(points(line)) == 400
    assert {y for _, y in points(line)} == {points(line)[0][1]}  # each bucket has the values 0 to 9
    assert hover(drawn)["series"][0]["values"][0] == 4.5
    assert len([path for path in drawn.iter("path") if "band" in path.attrib["class"]]) == 1


def test_points_have_their_interval_and_a_faint_line_the_next_ones_colour() -> None:
    drawn = figure(
        Series("raw", [0, 1], [0.0, 1.0], style="faint"),
        Series("mean", [0, 1], [0.5, 0.5]),
        Series("held-out", [0], [0.5], [0.25], [0.75], style="points"),
    )
    assert [line.attrib["class"] for line in drawn.iter("polyline")] == ["faint c0", "line c0"]
    (whisker,) = (line for line in drawn.iter("line") if "whisker" in line.attrib["class"])
    assert whisker.attrib["class"] == "whisker c1"
    assert [float(whisker.attrib[key]) for key in ("y1", "y2")] == pytest.approx([157, 59])
    assert [str(item.attrib["class"]) for item in drawn.iter("li")] == ["c0", "c1"]
    assert [series["name"] for series in hover(drawn)["series"]] == ["mean", "held-out"]


def test_what_a_user_wrote_stays_text() -> None:
    text = draw(Chart("<script>", "", "a & b", [Series('"><i>', [0, 1], [0, 1]), Series("b", [0, 1], [0, 1])]))
    assert "<script>" not in text
    assert html.escape('"><i>') in text
    ElementTree.fromstring(text)


def test_a_chart_that_never_moves_is_known() -> None:
    assert is_constant(Chart("T", "", "", [Series("a", [0, 1], [1.0, 1.0]), Series("b", [0], [2.0])]))
    assert is_constant(Chart("T", "nats", "", [Series("a", [0, 1], [0.0, 1e-12])]))
    assert is_constant(Chart("T", "", "", [Series("a", [0, 1], [math.nan, 1.0])]))
    assert is_constant(Chart("T", "", ""))
    assert not is_constant(Chart("T", "", "", [Series("a", [0, 1], [0.0, 1e-12])]))
    assert not is_constant(Chart("T", "s", "", [Series("a", [0, 1], [1.0, 1.0])], is_stacked=True))
