"""Arrivals: nobody is handed over before its time, and nobody is lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.arrivals import Arrivals, poisson_arrivals
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.policies import Dynamic, Gathering, Policy
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.records import Request, RowId, Sampling
from tests.fakes import FakeRequests, FakeRunner, LetterText

START_S = 100.0


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = START_S

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def request(index: int, arrival_s: float, priority: int = 0) -> Request:
    return Request(RowId("s", index), [1], Sampling(3), priority=priority, arrival_s=arrival_s)


def opened(requests: list[Request], **more) -> tuple[Arrivals, Time]:
    time = Time()
    return Arrivals(FakeRequests(requests), time, time.sleep, **more), time


def indexes(requests) -> list[int]:
    return [each.id.index for each in requests]


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=15),
    limits=st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
def test_rows_are_handed_over_by_band_once_their_time_has_come(arrivals, limits):
    outside = [request(index, *each) for index, each in enumerate(arrivals)]
    source, time = opened(outside)
    for turn in range(40):
        now_s = time.now - START_S
        limit = limits[turn % len(limits)] + (turn > 10)
        due = [each for each in outside if each.arrival_s <= now_s]
        due.sort(key=lambda each: (each.priority, each.arrival_s, each.id))
        assert indexes(source.take(limit)) == indexes(due[:limit])
        outside = [each for each in outside if each not in due[:limit]]
        assert source.exhausted == (not outside)
        time.now += 1.0
    assert source.exhausted


def test_a_request_carries_its_arrival_on_the_clock_of_the_engine():
    source, time = opened([request(0, 2.5)])
    assert list(source.take(9)) == []
    time.now += 4.0
    assert list(source.take(9)) == [replace(request(0, 2.5), arrival_s=START_S + 2.5)]


def test_waiting_ends_with_the_next_arrival():
    source, time = opened([request(0, 0.25)])
    source.take(9)
    source.wait(0.1)
    assert time.now == START_S + 0.1
    source.wait(1.0)
    assert time.now == START_S + 0.25
    source.wait(1.0)
    assert indexes(source.take(9)) == [0]


def test_waiting_for_one_who_is_there_takes_no_time():
    source, time = opened([request(0, 0.0), request(1, 0.0)])
    source.take(1)
    source.wait(1.0)
    assert time.now == START_S


def test_no_more_rows_are_read_ahead_than_are_held():
    requests = FakeRequests([request(index, 0.0) for index in range(9)])
    source = Arrivals(requests, Time(), held_rows=4)
    assert indexes(source.take(2)) == [0, 1]
    assert len(requests.take(9)) == 5


def latencies(policy: Policy | None, arrivals: list[float], lookahead: int = 8) -> list[float]:
    """Seconds from arrival to start, a step taking one second."""
    time = Time()
    scheduler = Scheduler(
        Blocks(100, 4), Limits(2, 8, 8, lookahead), lambda: LetterText(str), policy=policy
    )
    runner = FakeRunner(4, before_step=lambda: time.sleep(1.0), output_length=lambda prompt: 99)
    source = Arrivals(
        FakeRequests([request(index, at) for index, at in enumerate(arrivals)]), time, time.sleep
    )
    steps = list(Engine(scheduler, runner, clock=time).run(source))
    done = sorted((c for step in steps for c in step.completions), key=lambda c: c.id)
    return [completion.queue_s for completion in done]


def test_the_engine_starts_rows_when_they_arrive():
    assert latencies(None, [0.0, 5.0, 10.0]) == [0.0, 0.0, 0.0]


def test_waiting_outside_a_full_window_is_waiting():
    # two slots, three steps a row, a window of one
    assert latencies(None, [0.0] * 6, lookahead=1) == pytest.approx([0, 1, 3, 4, 6, 7])


def test_the_engine_sleeps_until_the_door_opens():
    policy = Dynamic(Gathering(None, 2.0))
    # the last one knows that nobody else will come
    assert latencies(policy, [0.0, 10.0, 20.0]) == pytest.approx([2.0, 2.0, 0.0])


def test_poisson_arrivals_are_repeatable_and_have_their_rate():
    once, again = (list(islice(poisson_arrivals(4.0, seed=1), 20_000)) for _ in range(2))
    assert once == again
    assert once == sorted(once)
    assert once[-1] / len(once) == pytest.approx(0.25, rel=0.03)
    other = next(poisson_arrivals(4.0, seed=2))
    assert other != once[0]


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_has_to_be_positive(rate: float):
    with pytest.raises(ValueError, match="has no arrivals"):
        next(poisson_arrivals(rate, seed=0))
