"""A worker whose time runs out starts no rows that would not end, saves, and leaves."""

import threading

import pytest

from jobrunner.commands.status import look
from jobrunner.deadline import Deadline
from jobrunner.errors import ExitCode
from jobrunner.job import TIME_IS_UP
from jobrunner.records import Completion, RowError, RowId
from jobrunner.stop import Stop
from tests.world import World


def row(seconds: float, error: RowError | None = None) -> Completion:
    return Completion(RowId("a", 0), prefill_s=seconds / 2, decode_s=seconds / 2, error=error)


@pytest.mark.parametrize(
    ("rows_s", "left_s", "too_late"),
    [
        ([10, 20], 14.9, True),
        ([10, 20], 15.0, False),
        # no more than the bound of 30 s
        ([1000], 30.0, False),
        ([1000], 29.9, True),
        # nothing is known, or there is no end
        ([], 0.1, False),
        ([10], None, False),
    ],
)
def test_it_is_too_late_for_a_row_that_would_take_longer_than_is_left(rows_s, left_s, too_late):
    deadline = Deadline(most_s=30.0)
    deadline.observe(row(seconds) for seconds in rows_s)
    assert deadline.too_late(left_s) is too_late


def test_rows_that_are_errors_tell_nothing_of_how_long_a_row_takes():
    deadline = Deadline(most_s=30.0)
    deadline.observe([row(0.0, RowError("internal", "x")), row(10.0)])
    assert deadline.too_late(9.0)


def test_a_stop_comes_when_the_time_is_up():
    stop = Stop()
    assert stop.left_s is None
    stop.leave_in(0.05, "time")
    assert 0 < stop.left_s <= 0.05
    assert stop.wait(10)
    assert stop.reason == "time"


def test_a_stop_in_ten_years_can_be_asked_for():
    stop = Stop()
    stop.leave_in(10 * 365 * 86400.0, "time")
    assert not stop.requested


class NearTheEnd(Stop):
    """A stop whose time is nearly up as soon as some rows have ended."""

    near = False

    @property
    def left_s(self):
        return 1e-9 if self.near else 1e9


@pytest.fixture
def world(tmp_path, tiny_model):
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", [f"row {index}" for index in range(200)])
    return world


def test_near_the_end_rows_in_flight_are_ended_and_no_more_are_started(world):
    stop = NearTheEnd()
    batches = []

    def observe(step):
        stop.near = stop.near or bool(step.completions)
        batches.append(step.batch_size)

    summary = world.run(stop=stop, observe=observe, batch=4)
    assert summary.exit_code == ExitCode.RUN_AGAIN
    assert stop.reason == TIME_IS_UP
    # the last steps end what runs; what waits in the engine's window is given back
    assert batches[-1] < 4
    assert 0 < look(world.settings()).rows_done <= 8
    assert look(world.settings()).partial_rows == 0
    assert world.run().exit_code == ExitCode.OK
    assert world.problems() == []


def test_no_token_is_generated_twice_for_rows_that_are_given_back(tmp_path, tiny_model, world):
    (tmp_path / "peace").mkdir()
    peace = World(tmp_path / "peace", tiny_model)
    peace.add_shard("a.parquet", [f"row {index}" for index in range(200)])
    peace.run()
    world.run_and_stop(after_steps=6, batch=8)
    saved = look(world.settings()).partial_rows
    stop = NearTheEnd()

    def observe(step):
        stop.near = stop.near or bool(step.completions)

    assert world.run(stop=stop, observe=observe, batch=1).exit_code == ExitCode.RUN_AGAIN
    # one ran at a time: the others were only in the window
    assert look(world.settings()).partial_rows >= saved - 2 >= 4
    assert world.run().exit_code == ExitCode.OK
    assert world.results() == peace.results()
    assert world.tokens_generated == peace.tokens_generated


def test_a_job_that_ends_near_its_end_is_finished_and_not_stopped(world):
    stop = NearTheEnd()

    def observe(step):
        # when the feed has nothing left to keep back
        stop.near = step.waiting == 0 and bool(step.completions)

    assert world.run(stop=stop, observe=observe, batch=4).exit_code == ExitCode.OK
    assert not stop.requested


def test_a_job_that_starts_too_late_leaves_at_once(world):
    stop = Stop()
    stop.leave_in(-1.0, "too late")
    assert world.run(stop=stop).exit_code == ExitCode.RUN_AGAIN
    assert not world.tokens_file.exists()


def test_no_timer_keeps_a_process_alive():
    Stop().leave_in(1000.0, "time")
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert timers
    assert all(timer.daemon for timer in timers)
