"""Rows of equal lengths are let in at the rate at which they end; others as they come."""

import pytest

from jobrunner.config import BatchingTable
from jobrunner.engine.pace import Pace
from jobrunner.engine.scheduler import Limits
from jobrunner.simulate.cost import StepCost
from jobrunner.simulate.trace import TraceRow
from jobrunner.simulate.virtual import Machine, simulate

MANY, FEW = 1000, 199


def pace_of(capacity: int, slots: int, waiting: int = MANY) -> Pace:
    return Pace(capacity, slots, lambda: waiting)


def learned(pace: Pace, outputs: list[int], prompt: int = 100) -> Pace:
    for output in outputs:
        pace.observe(prompt, output)
    return pace


def started_in(pace: Pace, steps: int) -> int:
    """How many rows start if there is always one that would."""
    count = 0
    for _ in range(steps):
        pace.next_step()
        while pace.may_start:
            pace.started()
            count += 1
            if count > 10_000:
                return count
    return count


def test_nobody_is_held_back_before_lengths_are_known():
    assert started_in(learned(pace_of(1000, 100), [50] * 31), 1) > 10_000


def test_equal_rows_start_at_the_rate_at_which_they_end():
    # of 35,000 tokens a row holds 100 + 500 / 2: 100 rows together, and each ends after 500 steps
    pace = learned(pace_of(35_000, 1000), [500] * 40)
    assert started_in(pace, 5000) == pytest.approx(0.95 * 100 / 500 * 5000, abs=3)


def test_rows_of_different_lengths_come_apart_by_themselves():
    assert started_in(learned(pace_of(35_000, 1000), [100, 900] * 20), 1) > 10_000


def test_nobody_is_held_back_where_all_slots_fit():
    assert started_in(learned(pace_of(35_000, 99), [500] * 40), 1) > 10_000


def test_the_last_waves_are_left_as_they_are():
    assert started_in(learned(pace_of(35_000, 1000, FEW), [500] * 40), 1) > 10_000


def test_little_starts_at_once_after_a_pause():
    pace = learned(pace_of(350_000, 10_000, 10 * MANY), [500] * 40)
    started_in(pace, 1000)
    for _ in range(1000):
        pace.next_step()
    count = 0
    while pace.may_start:
        pace.started()
        count += 1
    assert count == 0.02 * 1000


def test_a_job_of_equal_rows_uses_the_memory_that_waves_would_leave_idle():
    rows = [TraceRow(20, 100, 0.0)] * 400
    machine = Machine(
        cost=StepCost(step_s=1.0),
        limits=Limits(200, 2000, 2000, 1000),
        kv_blocks=1500,
        batching=BatchingTable(order="input", block_size=1, prefix_cache=False),
        max_new_tokens=100,
    )
    steps = len(list(simulate(rows, machine)))
    # 12 rows fit at their ends, 34 waves of 100 steps; 21 fit on the average
    waves = 100 * -(-400 // (1500 // 120))
    assert steps < 0.75 * waves
    assert steps > 400 * 100 * 70 / 1500
