"""Limits that are left to the machine follow a synthetic device; numbers stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.batch_size import BatchSize
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.duplicates import Duplicates
from jobrunner.engine.engine import Engine
from jobrunner.engine.plan import Drawn, Plan
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.tuning import (
    Automatic,
    MaxBatchSize,
    Point,
    StepTimes,
    TokenBudget,
    Tuning,
    knee,
)
from jobrunner.records import Request, RowId, Sampling, Step
from tests.fakes import FakeRequests, FakeRunner, LetterText

Device = Callable[[int], float]


def flat_then_linear(flat_s: float, token_s: float) -> Device:
    return lambda tokens: max(flat_s, token_s * tokens)


def fixed_and_linear(fixed_s: float, token_s: float) -> Device:
    return lambda tokens: fixed_s + token_s * tokens


def curve(device: Device, tokens: Sequence[int]) -> list[Point]:
    return [Point(each, device(each)) for each in tokens]


# B_t = min(B_max, Q_t + B_{t-1} - D_t)


def test_of_five_waiting_four_join_when_two_of_six_are_done_and_eight_may_run():
    scheduler = Scheduler(Blocks(100, 4), Limits(8, 64, 64, 99), lambda: LetterText(str))
    for index in range(6):
        # two of them end with their first token
        sampling = Sampling(1 if index < 2 else 9)
        scheduler.add(Request(RowId("s", index), [index + 1], sampling), 0.0)
    runner = FakeRunner(4)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, runner.run(plan), 0.0)
    for index in range(6, 11):
        scheduler.add(Request(RowId("s", index), [index + 1], Sampling(9)), 0.0)
    assert (scheduler.running, scheduler.waiting) == (4, 5)
    plan = scheduler.plan(0.0)
    assert (scheduler.running, scheduler.waiting) == (8, 1)
    assert sum(not chunk.decode for chunk in plan.chunks) == 4


@given(
    most=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_decided_every_step_it_is_the_formula(most, steps):
    size, occupied = BatchSize(), 0
    for waiting, share in steps:
        occupied -= int(occupied * share)
        wanted = min(most, waiting + occupied)
        assert size.next(most=most, waiting=waiting, occupied=occupied) == wanted
        occupied = wanted


def test_between_two_decisions_the_last_one_holds():
    size = BatchSize(every=3)
    queues = [4, 9, 9, 9, 9]
    sizes = [size.next(most=8, waiting=waiting, occupied=1) for waiting in queues]
    assert sizes == [5, 5, 5, 8, 8]


def test_a_small_change_is_not_made_unless_the_next_decision_wants_one_too():
    size = BatchSize(every=2)
    rows = [size.next(most=64, waiting=w, occupied=30) for w in (0, 0, 2, 2, 2, 2, 0, 0, 0, 0)]
    assert rows == [30, 30, 30, 30, 32, 32, 32, 32, 32, 32]


def test_an_empty_batch_is_decided_at_once():
    size = BatchSize(every=100)
    assert size.next(most=8, waiting=0, occupied=0) == 0
    assert size.next(most=8, waiting=1, occupied=0) == 1


def test_a_batch_size_never_exceeds_a_most_that_fell():
    size = BatchSize(every=100)
    assert size.next(most=8, waiting=9, occupied=1) == 8
    assert size.next(most=4, waiting=9, occupied=8) == 4


# the knee of the step-time curve


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        # 0.97 · 500, and 97/3 · 100
        (flat_then_linear(0.010, 0.00002), 485),
        (fixed_and_linear(0.001, 0.00001), 3233),
        (fixed_and_linear(0.0, 0.00001), 1),
    ],
)
def test_the_knee_is_where_97_percent_of_the_best_rate_are_reached(device, expected):
    points = curve(device, [1, *range(50, 1_000_000, 50)])
    assert knee(points) == pytest.approx(expected, rel=0.02)


def test_the_knee_of_one_point_is_that_point():
    assert knee([Point(100.0, 1.0)]) == 100.0


def test_old_steps_fade_from_the_curve_and_are_forgotten():
    times = StepTimes()
    for _ in range(50):
        times.add(100, 1.0)
    for _ in range(600):
        times.add(1000, 2.0)
    assert [round(point.tokens) for point in times.points()] == [100, 1000]
    for _ in range(500):
        times.add(1000, 3.0)
    assert not times.knows(100)
    assert times.points()[0].seconds == pytest.approx(3 - 0.5 ** (500 / 256), abs=0.05)


# auto token budget


def run_budget(budget: TokenBudget, device: Device, steps: int, demand: int = 10**9) -> list[int]:
    """Steps of a device whose rows could fill each of them up to `demand` tokens."""
    seen = []
    for _ in range(steps):
        tokens = min(budget.tokens, demand)
        budget.observe(Step(tokens_computed=tokens, batch_size=1, forward_s=device(tokens)))
        seen.append(budget.tokens)
    return seen


@pytest.mark.parametrize(
    ("device", "least", "most"),
    [
        (flat_then_linear(0.010, 0.00002), 400, 520),
        (flat_then_linear(0.080, 0.00002), 3200, 4100),
        (fixed_and_linear(0.001, 0.00001), 1900, 3300),
        # linear from the start: the least that there may be
        (fixed_and_linear(0.0, 0.00001), 128, 128),
        # flat to the end: the most
        (flat_then_linear(1.0, 0.00001), 7000, 8192),
    ],
)
def test_the_budget_settles_at_the_knee_of_the_device(device, least, most):
    budget = TokenBudget(8192)
    budget.at_least(128)
    seen = run_budget(budget, device, 4000)
    usual = sorted(seen[2000:])[1000]
    assert least <= usual <= most
    assert max(seen) <= 8192
    assert min(seen) >= 128


def test_the_budget_follows_a_device_whose_knee_moves():
    budget = TokenBudget(8192)
    seen = run_budget(budget, flat_then_linear(0.010, 0.00002), 4000)
    assert sorted(seen[2000:])[1000] < 600
    seen = run_budget(budget, flat_then_linear(0.100, 0.00002), 4000)
    assert sorted(seen[2000:])[1000] > 3000
    seen = run_budget(budget, flat_then_linear(0.010, 0.00002), 10_000)
    # from each size to half of it, what is known of that has to fade first
    assert sorted(seen[8000:])[1000] < 600


@pytest.mark.parametrize("fixed_tokens", [10, 100, 300])
def test_the_budget_keeps_97_percent_of_the_best_rate(fixed_tokens):
    device = fixed_and_linear(fixed_tokens * 1e-5, 1e-5)
    budget = TokenBudget(8192)
    budget.at_least(128)
    seen = run_budget(budget, device, 8000)[2000:]
    rate = sum(seen) / sum(map(device, seen))
    # those that are tried now and then cost a little, or bring some
    assert rate == pytest.approx(0.97 * 8192 / device(8192), rel=0.01)


def test_a_budget_that_steps_do_not_use_up_stays():
    budget = TokenBudget(8192)
    assert set(run_budget(budget, flat_then_linear(0.010, 0.00002), 2000, demand=600)) == {8192}


def test_the_log_tells_of_a_budget_once_and_not_of_what_is_tried(caplog):
    caplog.set_level("INFO", "cbjob")
    budget = TokenBudget(8192)
    budget.at_least(128)
    seen = run_budget(budget, flat_then_linear(0.010, 0.00002), 20_000)
    assert len(set(seen)) > 2
    assert [record.message.split(",")[0] for record in caplog.records] == ["token budget: 8"]


# auto batch size


def run_batch(
    batch: MaxBatchSize,
    device: Device,
    steps: int = 3000,
    *,
    waiting: int = 5,
    slots_filled: int = 10**9,
    blocks_per_row: int = 1,
    blocks: int = 10**9,
    preemptions: int = 0,
) -> list[int]:
    seen = []
    for _ in range(steps):
        running = min(batch.size, slots_filled)
        batch.observe(
            Step(
                tokens_computed=running,
                batch_size=running,
                running=running,
                waiting=waiting,
                step_s=device(running),
                kv_blocks_used=running * blocks_per_row,
                kv_blocks=blocks,
                preemptions=preemptions,
            )
        )
        seen.append(batch.size)
    return seen


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        # each doubling gives at least 8.9% more
        (fixed_and_linear(0.010, 0.0001), 1024),
        # 64 to 128 gives 13%, 128 to 256 gives 7%, 256 to 512 gives 3.8%
        (fixed_and_linear(0.010, 0.0005), 256),
        (fixed_and_linear(0.0, 0.0005), 64),
        (flat_then_linear(0.010, 0.00004), 256),
    ],
)
def test_the_batch_grows_while_a_doubling_gives_five_percent(device, expected):
    batch = MaxBatchSize(64, 1024)
    seen = run_batch(batch, device)
    assert sorted(seen[1500:])[750] == expected
    assert min(seen) == 64


def test_a_doubling_that_did_not_pay_is_tried_again_more_and_more_seldom():
    batch = MaxBatchSize(64, 1024)
    seen = run_batch(batch, fixed_and_linear(0.0, 0.0005), 20_000)
    starts = [step for step in range(1, len(seen)) if seen[step - 1] == 64 and seen[step] == 128]
    gaps = [second - first for first, second in pairwise(starts)]
    assert len(gaps) >= 3
    assert all(second > 1.5 * first for first, second in pairwise(gaps))


def test_the_batch_grows_when_later_a_doubling_pays():
    batch = MaxBatchSize(64, 128)
    run_batch(batch, fixed_and_linear(0.0, 0.0005), 1000)
    assert batch.size == 64
    run_batch(batch, fixed_and_linear(0.010, 0.0001), 3000)
    assert batch.size == 128


@pytest.mark.parametrize(
    "why",
    [
        {"waiting": 0},
        {"slots_filled": 50},
        {"blocks_per_row": 10, "blocks": 2 * 640 - 1},
        {"preemptions": 1},
    ],
)
def test_the_batch_stays_without_rows_or_memory_for_more(why):
    batch = MaxBatchSize(64, 1024)
    assert set(run_batch(batch, fixed_and_linear(0.010, 0.0001), **why)) == {64}


def test_a_doubled_batch_that_cannot_be_filled_is_taken_back():
    batch = MaxBatchSize(64, 1024)
    seen = run_batch(batch, fixed_and_linear(0.010, 0.0001), 1500, slots_filled=100)
    assert 128 in seen
    assert batch.size == 64


def test_the_log_tells_of_each_growth_once(caplog):
    caplog.set_level("INFO", "cbjob")
    run_batch(MaxBatchSize(64, 1024), fixed_and_linear(0.010, 0.0005), 20_000)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "max_batch_size: 64 -> 128",
        "max_batch_size: 128 -> 256",
    ]


# all limits together, in the engine


class TimedRunner:
    """A fake model on a device of which it is known how long a step takes."""

    def __init__(self, device: Device) -> None:
        self.now = 0.0
        self._device = device
        self._runner = FakeRunner(4)

    def run(self, plan: Plan) -> Drawn:
        self.now += self._device(plan.prefill_tokens + plan.decode_tokens)
        return self._runner.run(plan)

    def clock(self) -> float:
        return self.now


def serve(automatic: Automatic, limits: Limits, device: Device, rows: int) -> list[Limits]:
    """The limits of each step of an engine that is checked after every one."""
    runner = TimedRunner(device)
    scheduler = Scheduler(Blocks(300, 4), limits, lambda: LetterText(str))
    engine = Engine(
        scheduler,
        runner,
        runner.clock,
        duplicates=Duplicates(),
        tuning=Tuning(limits, automatic),
    )
    requests = [
        Request(RowId("s", index), [index, index // 7, 3], Sampling(12)) for index in range(rows)
    ]
    seen, done = [], 0
    for step in engine.run(FakeRequests(requests)):
        assert step.tokens_computed <= (seen[-1] if seen else limits).token_budget
        scheduler.check()
        done += len(step.completions)
        seen.append(scheduler.limits)
    assert done == rows
    return seen


ALL = Automatic(max_batch_size=True, token_budget=True, chunk_size=True, lookahead=True)


def test_limits_grow_together_and_every_row_ends():
    seen = serve(ALL, Limits(8, 64, 64, 32), fixed_and_linear(0.010, 0.0001), 900)
    assert max(each.max_batch_size for each in seen) > 8
    for each in seen:
        assert each.max_batch_size <= each.token_budget <= 64
        assert each.chunk_size == each.token_budget
        assert each.lookahead == 4 * each.max_batch_size


def test_limits_shrink_together_and_every_row_ends():
    seen = serve(ALL, Limits(8, 64, 64, 32), fixed_and_linear(0.0, 0.0005), 1300)
    assert {each.max_batch_size for each in seen} == {8, 16}
    assert seen[-1].max_batch_size == 8


def test_limits_given_as_numbers_never_change():
    limits = Limits(8, 64, 40, 33)
    for automatic, kept in (
        (Automatic(), ("max_batch_size", "token_budget", "chunk_size", "lookahead")),
        (Automatic(max_batch_size=True), ("token_budget", "chunk_size", "lookahead")),
        (Automatic(token_budget=True), ("max_batch_size", "chunk_size", "lookahead")),
    ):
        for each in serve(automatic, limits, fixed_and_linear(0.010, 0.0001), 400):
            assert all(getattr(each, name) == getattr(limits, name) for name in kept)


def test_a_budget_below_what_runs_is_refused():
    scheduler = Scheduler(Blocks(100, 4), Limits(8, 64, 64, 32), lambda: LetterText(str))
    for index in range(3):
        scheduler.add(Request(RowId("s", index), [index], Sampling(9)), 0.0)
    scheduler.plan(0.0)
    with pytest.raises(ValueError, match="token_budget is 2, 3 are running"):
        scheduler.retune(Limits(2, 2, 2, 2))
