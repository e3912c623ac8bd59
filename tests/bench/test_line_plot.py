"""The picture of figures over a variable: both axes, every line in its place, whatever its name."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from kvbaton_proof.bench.kit.lab_pages import HEIGHT, LEFT, line_plot

SVG = "{http://www.w3.org/2000/svg}"


def points_of(picture: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(picture).findall(f"{SVG}polyline")
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in line.attrib["points"].split())]
        for line in lines
    ]


def test_goodput_over_rate_rises_to_the_right_and_stands_in_its_scale() -> None:
    picture = line_plot({"kvbaton": [(0, 0), (5, 5), (10, 8)], "x": [(5, 4)]}, "goodput", "requests/s", "good/s")
    ours, other = points_of(picture)
    assert ours[0] == (LEFT, HEIGHT - 50) and ours[1][0] < ours[2][0] and ours[2][1] < ours[1][1]
    assert other[0][0] == ours[1][0] and other[0][1] > ours[1][1]
    for words in ("goodput", "requests/s", "good/s", "kvbaton", ">10<", ">8<"):
        assert words in picture


@pytest.mark.parametrize("log", [True, False])
def test_a_line_without_points_odd_names_and_zeros_can_be_drawn(log: bool) -> None:
    picture = line_plot({"<a&b>": [(0.0, 0.0), (1e3, 2.0)], "none": []}, "t", "x", "y", log_x=log, log_y=log)
    assert len(points_of(picture)) == 1 and "&lt;a&amp;b&gt;" in picture
    ElementTree.fromstring(line_plot({}, "nothing", "x", "y", log_x=log))


def test_equal_steps_of_a_logarithmic_axis_are_equal_factors() -> None:
    (line,) = points_of(line_plot({"a": [(4, 1), (16, 1), (64, 1)]}, "t", "KiB", "GB/s", log_x=True))
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.2)
