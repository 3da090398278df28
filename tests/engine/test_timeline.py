"""What overlaps on the fake device, and the drawing of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.show_timeline import Span, TimedBench, crowded, plain, timelines

GOLDEN = Path(__file__).parents[1] / "golden" / "timeline.txt"


def span(bench: TimedBench, lane: str, step: int) -> Span:
    [found] = [each for each in bench.spans if (each.lane, each.step) == (lane, step)]
    return found


@pytest.mark.parametrize("step", range(1, 12))
def test_the_next_step_is_launched_before_the_last_is_read_back(step: int):
    ahead, waiting = plain(ahead=True), plain(ahead=False)
    read_back = span(ahead, "host read-back", step)
    assert span(ahead, "host launch", step + 1).stop_ms <= read_back.start_ms
    # the device goes from one to the other without a gap
    assert span(ahead, "device compute", step + 1).start_ms == read_back.stop_ms
    read_back = span(waiting, "host read-back", step)
    assert span(waiting, "host plan", step + 1).start_ms > read_back.stop_ms


def test_a_step_computes_when_its_copies_are_done_and_they_begin_after_the_step_before():
    bench = crowded()
    copies = [each for each in bench.spans if each.lane == "device copy"]
    assert len(copies) > 1
    for copy in copies:
        assert span(bench, "device compute", copy.step).start_ms == copy.stop_ms
        assert span(bench, "device compute", copy.step - 1).stop_ms <= copy.start_ms


def test_no_lane_does_two_things_at_once():
    for bench in (plain(ahead=True), plain(ahead=False), crowded()):
        for lane in {each.lane for each in bench.spans}:
            spans = sorted((e.start_ms, e.stop_ms) for e in bench.spans if e.lane == lane)
            for (_, stop_ms), (start_ms, _) in pairwise(spans):
                assert stop_ms <= start_ms


def test_the_drawing():
    assert timelines() == GOLDEN.read_text()
