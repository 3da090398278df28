"""A step that does not end: noticed in time, said in words, and never by mistake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.plan import Chunk, Decodes, Plan
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Stopping
from jobrunner.engine.swap import Copy
from jobrunner.engine.watchdog import (
    Patience,
    StepLimit,
    Watchdog,
    step_limit,
    watchdog,
    words_of,
)
from jobrunner.records import Request, RowId, Sampling
from tests.fakes import FakeRequests, FakeRunner, LetterText, StillClock


def sequence(index: int, length: int = 4) -> Sequence:
    sampling = Sampling(5)
    request = Request(RowId("a", index), [1] * length, sampling)
    return Sequence(request, Stopping(sampling, lambda: LetterText(str)), 0.0)


def plan_of(*lengths: int, **more: Any) -> Plan:
    chunks = [Chunk(sequence(index, n), 0, n, True) for index, n in enumerate(lengths)]
    return Plan(Decodes(), chunks, **more)


class Kennel:
    """A watchdog with a clock that the test moves; what it would end the worker with is kept."""

    def __init__(self, limit: StepLimit, **more: Any) -> None:
        self.clock = StillClock()
        self.said: list[str] = []
        self.dog = Watchdog(limit, self.said.append, clock=self.clock, **more)

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            self.dog.look()


def test_a_step_within_its_limit_is_left_alone_and_one_over_it_is_not():
    kennel = Kennel(StepLimit(10.0))
    with kennel.dog.watching(plan_of(3)):
        kennel.passes(10)
    assert kennel.said == []
    with kennel.dog.watching(plan_of(3, number=7)):
        kennel.passes(11)
    [words] = kennel.said
    assert words.startswith(
        "step 7 (0 single tokens, 3 of prompts, 0 swapped blocks; row 0 of `a`) has taken 11.0 s,"
        " more than the 10.0 s of batching.max_step; it is in "
    )


def test_time_between_steps_does_not_count():
    kennel = Kennel(StepLimit(10.0))
    for _ in range(5):
        with kennel.dog.watching(plan_of(3)):
            kennel.passes(9)
        kennel.passes(100)
    assert kennel.said == []


def test_time_in_which_the_process_was_stopped_does_not_count():
    kennel = Kennel(StepLimit(10.0))
    with kennel.dog.watching(plan_of(3)):
        kennel.passes(5)
        # suspended for an hour
        kennel.clock.now += 3600
        kennel.dog.look()
        assert kennel.said == []
        kennel.passes(4)
    assert len(kennel.said) == 1


def test_a_step_on_a_cpu_may_take_longer_the_more_tokens_it_has():
    limit = step_limit("auto", "cpu")
    assert limit.of(plan_of(100, 50)) == limit.of(plan_of(50)) + 100
    assert step_limit("auto", "cuda").of(plan_of(8000)) == 300
    assert step_limit(2.5, "cpu").of(plan_of(8000)) == 2.5


def test_who_waits_for_a_device_may_notice_first():
    clock = StillClock()
    said: list[str] = []
    for ahead, seconds in ((False, 11), (True, 19)):
        dog = watchdog(StepLimit(10.0), ahead=ahead)
        dog._end, dog._clock = said.append, clock
        with dog.watching(plan_of(3)):
            for _ in range(seconds):
                clock.now += 1.0
                dog.look()
        assert len(said) == 1


def test_patience_ends_just_over_its_limit():
    clock = StillClock()
    patience = Patience(1.0, clock)
    clock.now = 1.0
    assert not patience.is_over
    clock.now = 1.001
    assert patience.is_over


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (0, "no row"),
        (1, "row 0 of `a`"),
        (3, "row 0 of `a`, row 1 of `a`, row 2 of `a`"),
        (5, "row 0 of `a`, row 1 of `a`, row 2 of `a` and 2 more"),
    ],
)
def test_a_step_is_said_with_its_first_few_rows(rows: int, words: str):
    copies = [Copy([1, 2], [0, 1], out=True)]
    said = words_of(plan_of(*[4] * rows, copies=copies, number=1234))
    start = f"step 1,234 (0 single tokens, {4 * rows} of prompts, 2 swapped blocks; "
    assert said == start + words + ")"


def engine_that(before_step: Callable[[], None], dog: Watchdog) -> Engine:
    limits = Limits(4, 16, 16, lookahead=8)
    scheduler = Scheduler(Blocks(20, 4), limits, lambda: LetterText(str))
    return Engine(scheduler, FakeRunner(4, before_step=before_step), watchdog=dog)


def rows(count: int) -> FakeRequests:
    sampling = Sampling(5, stop_ids=frozenset({0}))
    return FakeRequests([Request(RowId("a", n), [n + 1] * 3, sampling) for n in range(count)])


def test_a_step_that_hangs_is_noticed_while_it_hangs():
    noticed = threading.Event()
    words: list[str] = []

    def end(said: str) -> None:
        words.append(said)
        noticed.set()

    steps = 0

    def hang_in_the_third() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            assert noticed.wait(30), "nobody noticed"

    dog = Watchdog(StepLimit(1.0), end)
    assert list(engine_that(hang_in_the_third, dog).run(rows(2)))
    assert words[0].startswith("step 3 (")
    assert "row 0 of `a`, row 1 of `a`" in words[0]


def test_the_watching_thread_ends_with_the_run():
    # those of other tests may end meanwhile
    others = set(threading.enumerate())
    run = engine_that(lambda: None, Watchdog(StepLimit(60.0))).run(rows(2))
    next(run)
    (watching,) = set(threading.enumerate()) - others
    assert watching.name == "watchdog"
    run.close()
    watching.join(10)
    assert not watching.is_alive()
