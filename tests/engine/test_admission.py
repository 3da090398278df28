"""Who may join by what the blocks will be used for, against a slow obvious forecast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.admission import Admission, AdmissionAhead, Reserve
from jobrunner.engine.forecast import Forecast
from jobrunner.engine.pace import Pace
from jobrunner.engine.prediction import LengthPredictor
from tests.engine.memory_bench import MemoryBench, finished, preemptions, request
from tests.properties import examples

SETTINGS = examples(200)


def ahead(block_size: int = 4, reserve: float = 0.0) -> AdmissionAhead:
    pace = Pace(10**9, 1, lambda: 0)
    return AdmissionAhead(LengthPredictor(), block_size, Reserve(reserve), pace)


class SlowForecast:
    """Every sequence as (tokens, remaining, shared), grown step by step."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: list[list[int]] = []

    def next_step(self) -> None:
        for each in self.sequences:
            each[:2] = [each[0] + 1, each[1] - 1]

    def leave(self, slot: int) -> None:
        last = self.sequences.pop()
        if slot < len(self.sequences):
            self.sequences[slot] = last

    def use(self, tokens: int, shared: int) -> float:
        """Blocks of one sequence; the one that is being filled is half empty on average."""
        return tokens / self.block_size + (self.block_size - 1) / (2 * self.block_size) - shared

    def peak(self, used: int, tokens: int, remaining: int, shared: int) -> float:
        # whoever outlives what was expected is in use and in no line
        now = sum(self.use(held, both) for held, left, both in self.sequences if left > 0)
        beyond = max(0.0, used - now)
        everyone = [*self.sequences, [tokens, remaining, shared]]
        return beyond + max(
            sum(self.use(held + step, both) for held, left, both in everyone if left > step)
            for step in range(remaining)
        )


@SETTINGS
@given(
    block_size=st.integers(1, 5),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["enter", "enter", "leave", "step", "correct", "peak"]),
            st.integers(1, 30),
            st.integers(1, 20),
            st.integers(0, 2),
        ),
        max_size=40,
    ),
    used=st.integers(0, 60),
)
def test_the_foreseen_peak_is_the_highest_of_all_steps(block_size, moves, used):
    fast, slow = Forecast(block_size), SlowForecast(block_size)
    for move, more_tokens, remaining, shared in moves:
        tokens = shared * block_size + more_tokens
        if move == "enter":
            fast.enter(tokens, remaining, shared)
            slow.sequences.append([tokens, remaining, shared])
        elif move == "leave" and slow.sequences:
            fast.leave(tokens % len(slow.sequences))
            slow.leave(tokens % len(slow.sequences))
        elif move == "step":
            fast.next_step()
            slow.next_step()
        elif move == "correct" and slow.sequences:
            slow.sequences = [
                [tokens + place, remaining + place, both]
                for place, (_, _, both) in enumerate(slow.sequences)
            ]
            held, left, _ = zip(*slow.sequences, strict=True)
            fast.correct(np.array(held), np.array(left))
        expected = slow.peak(used, tokens, remaining, shared)
        assert fast.peak(used, tokens, remaining, shared) == pytest.approx(expected)
        assert len(fast) == len(slow.sequences)


@examples(100)
@given(
    rows=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 20)), min_size=1, max_size=10),
    blocks=st.integers(30, 60),
    batch=st.integers(1, 5),
)
def test_lengths_that_come_true_preempt_nobody(rows, blocks, batch):
    # a block for a token leaves nothing to rounding
    bench = MemoryBench(blocks=blocks, block_size=1, batch=batch, admission=ahead(1))
    requests = [request(index, [index] * prompt, most) for index, (prompt, most) in enumerate(rows)]
    steps = bench.serve(requests)
    assert len(finished(steps)) == len(rows)
    assert preemptions(steps) == 0


def test_rows_wait_for_memory_that_others_will_need():
    requests = [request(index, [index] * 8, 12) for index in range(2)]
    careless = MemoryBench(blocks=6, batch=2).serve(requests)
    careful = MemoryBench(blocks=6, batch=2, admission=ahead()).serve(requests)
    assert (preemptions(careless), preemptions(careful)) == (1, 0)


def test_a_row_joins_as_soon_as_the_others_end_in_time():
    # 8 + 12 tokens and 4 + 12: together at most 9 blocks if the second begins later
    requests = [request(0, [0] * 8, 12), request(1, [1] * 4, 12)]
    steps = MemoryBench(blocks=8, batch=2, admission=ahead()).serve(requests)
    assert preemptions(steps) == 0
    assert max(step.running for step in steps) == 2
    assert len(steps) < 12 + 12


def test_what_a_row_needs_after_the_longest_other_has_ended_is_its_own():
    forecast = Forecast(1)
    forecast.enter(10, 5, 0)
    assert forecast.peak(10, 1, 2, 0) == 10 + 1 + 1 + 1
    assert forecast.peak(10, 1, 100, 0) == 1 + 99


def test_shared_blocks_count_once():
    forecast = Forecast(1)
    forecast.enter(10, 2, 0)
    forecast.enter(10, 2, 8)
    assert forecast.peak(12, 10, 2, 8) == 12 + 2 + 3


def test_an_empty_engine_admits_whatever_its_tokens_fit():
    bench = MemoryBench(blocks=3, batch=2, admission=ahead(reserve=0.9))
    done = finished(bench.serve([request(index, [index] * 8, 4) for index in range(3)]))
    assert all(completion.error is None for completion in done.values())


def test_the_reserve_stays_free():
    requests = [request(index, [index] * 4, 4) for index in range(20)]

    def most_used(reserve: float) -> int:
        bench = MemoryBench(blocks=20, batch=20, admission=ahead(reserve=reserve))
        return max(step.kv_blocks_used for step in bench.serve(requests))

    assert most_used(0.0) > 16
    assert most_used(0.5) <= 10


def test_the_automatic_reserve_grows_with_preemptions_and_shrinks_again():
    reserve = Reserve("auto")
    least = reserve.share
    for _ in range(5):
        reserve.preempted()
    grown = reserve.share
    assert grown > least
    for _ in range(5000):
        reserve.next_step()
    assert least <= reserve.share < least + (grown - least) / 100
    for _ in range(1000):
        reserve.preempted()
    assert reserve.share < 0.5


def test_a_fixed_reserve_stays_as_it_is():
    reserve = Reserve(0.2)
    reserve.preempted()
    reserve.next_step()
    assert reserve.share == 0.2


def test_without_prediction_each_running_row_is_left_one_block():
    bench = MemoryBench(blocks=5, batch=5, admission=Admission())
    steps = bench.serve([request(index, [index] * 4, 2) for index in range(4)])
    assert max(step.running for step in steps) == 3
