"""Slots and steps as text and as an image."""

import xml.etree.ElementTree as ElementTree

from jobrunner.simulate.timeline import (
    DECODE,
    IDLE,
    KEPT,
    PREFILL,
    Timeline,
    legend,
    svg,
    text,
)

SVG = "{http://www.w3.org/2000/svg}"


def drawn(slots: int, *steps: list[int]) -> Timeline:
    timeline = Timeline(slots)
    for step in steps:
        timeline.add(bytes(step))
    return timeline


def test_a_line_a_slot_and_a_mark_a_step():
    timeline = drawn(2, [PREFILL, PREFILL], [DECODE, KEPT], [DECODE, IDLE])
    assert text(timeline, 10, 10) == ["▓██", "▓░·"]


def test_the_legend_names_every_mark():
    assert legend() == "· idle   ▓ prefill   █ decode   ░ finished, keeps its place"


def test_steps_that_do_not_fit_share_a_cell_which_shows_most_of_them():
    timeline = drawn(1, *[[PREFILL]] * 2, [DECODE], *[[DECODE]] * 3, *[[IDLE]] * 3)
    assert text(timeline, 1, 3) == ["▓█·"]


def test_slots_that_do_not_fit_share_a_line():
    timeline = drawn(4, [DECODE, DECODE, IDLE, IDLE])
    assert text(timeline, 2, 9) == ["█", "·"]


def test_a_timeline_without_steps_is_empty():
    assert text(Timeline(3), 3, 9) == ["", "", ""]
    assert ElementTree.fromstring(svg({"none": Timeline(3)})) is not None


def test_the_image_has_a_title_for_each_policy_and_a_rectangle_for_each_stretch():
    image = ElementTree.fromstring(
        svg(
            {
                "a<b": drawn(2, [PREFILL, PREFILL], [DECODE, DECODE], [DECODE, IDLE]),
                "c": drawn(1, [DECODE]),
            }
        )
    )
    titles = [element.text for element in image.iter(f"{SVG}text")]
    assert titles[:2] == ["a<b: 3 steps", "c: 1 steps"]
    rectangles = [element.get("fill") for element in image.iter(f"{SVG}rect")]
    # the background, then slots: prefill and decode; prefill, decode and idle; decode; the key
    assert len(rectangles) == 1 + 2 + 3 + 1 + 4


def test_panels_of_an_image_have_one_scale_of_steps():
    image = ElementTree.fromstring(svg({"a": drawn(1, *[[DECODE]] * 4), "b": drawn(1, [DECODE])}))
    widths = [float(element.get("width")) for element in image.iter(f"{SVG}rect")]
    assert widths[1] == 4 * widths[2]
