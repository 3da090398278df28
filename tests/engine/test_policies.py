"""When rows join and leave under each policy: by definition, and against a slow scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.plan import Drawn
from jobrunner.engine.policies import (
    Continuous,
    Door,
    Dynamic,
    Gated,
    Gathering,
    Policy,
    Static,
    policy_named,
)
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.waiting import Waiting
from jobrunner.records import Completion, Request, RowId, Sampling
from tests.fakes import LetterText
from tests.properties import examples

SLOTS = 4
DELAY_S = 3.0
POLICIES = ("static", "dynamic", "continuous", "gated")


def made(name: str, preferred: int = 3, delay_s: float = DELAY_S) -> Policy:
    if name == "gated":
        return Gated(Gathering(preferred, delay_s))
    return {
        "static": Static,
        "dynamic": lambda: Dynamic(Gathering(preferred, delay_s)),
        "continuous": Continuous,
    }[name]()


def request(index: int, length: int = 1, arrival_s: float = 0.0, priority: int = 0) -> Request:
    prompt = [1000 + index]
    return Request(RowId("s", index), prompt, Sampling(length), (), priority=priority)


@dataclass
class Ended:
    """When a row joined and when it was handed out, in steps from 0."""

    joined: int
    left: int


class Bench:
    """The scheduler under a policy, a step a second, with memory and tokens for everybody."""

    def __init__(
        self, policy: Policy, *, slots: int = SLOTS, lookahead: int = 1_000, **more
    ) -> None:
        self.scheduler = Scheduler(
            Blocks(more.pop("blocks", 1_000), 4),
            Limits(slots, more.pop("budget", 1_000), 1_000, lookahead),
            lambda: LetterText(str),
            policy=policy,
            waiting=Waiting(**more),
        )
        self.steps = 0
        self.active: list[set[int]] = []
        self.ended: dict[int, Ended] = {}
        self.completions: dict[int, Completion] = {}
        self._joined: dict[int, int] = {}

    def step(self, requests: Sequence[Request] = (), *, last_call: bool = False) -> list[int]:
        """Add requests, plan and commit; return who is handed out."""
        now = float(self.steps)
        for each in requests:
            assert self.scheduler.add(each, now) is None
        plan = self.scheduler.plan(now, last_call=last_call)
        self.active.append({chunk.sequence.request.id.index for chunk in plan.chunks})
        for index in self.active[-1]:
            self._joined.setdefault(index, self.steps)
        tokens = [1] * sum(chunk.samples for chunk in plan.chunks)
        done = [*plan.completions, *self.scheduler.commit(plan, Drawn(tokens), now)]
        self.scheduler.check()
        for completion in done:
            index = completion.id.index
            assert index not in self.ended, "a row was handed out twice"
            self.ended[index] = Ended(self._joined[index], self.steps)
            self.completions[index] = completion
        self.steps += 1
        return sorted(completion.id.index for completion in done)

    def finish(self, most_steps: int = 500) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step(last_call=True)
            assert self.steps < most_steps, "a row waits for ever"


def reference(name: str, rows: list[tuple[int, int]], preferred: int) -> dict[int, Ended]:
    """Rows (arrival, length) under a policy, by its definition: one list, walked every step."""
    outside = [(arrival, index) for index, (arrival, _) in enumerate(rows)]
    line: list[int] = []
    let_in: set[int] = set()
    left = {index: length for index, (_, length) in enumerate(rows)}
    slots: list[int] = []
    ended: dict[int, Ended] = {}
    joined: dict[int, int] = {}
    step = 0
    while len(ended) < len(rows):
        line += [index for arrival, index in outside if arrival == step]
        last_call = all(arrival <= step for arrival, _ in outside)
        enough = len(line) >= preferred or bool(line and step - rows[line[0]][0] >= DELAY_S)
        full = len(line) >= SLOTS
        opens = {
            "continuous": True,
            "gated": enough or last_call,
            "static": not slots and (full or last_call),
            "dynamic": not slots and (full or enough or last_call),
        }[name]
        if opens:
            let_in |= set(line[:SLOTS] if name in ("static", "dynamic") else line)
        while len(slots) < SLOTS and line and line[0] in let_in:
            joined[line[0]] = step
            slots.append(line.pop(0))
        for index in slots:
            left[index] -= 1
        together = name in ("static", "dynamic")
        leaving = [index for index in slots if left[index] <= 0]
        if not together or len(leaving) == len(slots):
            for index in leaving:
                ended[index] = Ended(joined[index], step)
                slots.remove(index)
        step += 1
    return ended


@examples(300)
@given(
    name=st.sampled_from(POLICIES),
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=14),
    preferred=st.integers(1, 5),
)
def test_rows_join_and_leave_as_the_definition_of_the_policy_says(name, rows, preferred):
    rows = sorted(rows, key=lambda row: row[0])
    bench = Bench(made(name, preferred))
    for step in range(13):
        coming = [request(i, length) for i, (at, length) in enumerate(rows) if at == step]
        bench.step(coming, last_call=step >= rows[-1][0])
    bench.finish()
    assert bench.ended == reference(name, rows, preferred)


@examples(150)
@given(
    name=st.sampled_from(POLICIES),
    rows=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12
    ),
    blocks=st.integers(4, 12),
    budget=st.integers(SLOTS, 8),
)
def test_every_row_ends_under_every_policy_with_little_memory(name, rows, blocks, budget):
    bench = Bench(made(name), blocks=blocks, budget=budget)
    for step in range(9):
        rows_now = [(i, row) for i, row in enumerate(rows) if row[0] == step]
        bench.step([request(i, length, priority=p) for i, (_, length, p) in rows_now])
    bench.finish()
    assert sorted(bench.ended) == list(range(len(rows)))
    assert all(done.error is None for done in bench.completions.values())


@examples(100)
@given(lengths=st.lists(st.integers(1, 9), min_size=SLOTS, max_size=SLOTS))
def test_a_static_batch_lasts_as_long_as_its_longest_row(lengths):
    bench = Bench(Static())
    bench.step([request(index, length) for index, length in enumerate(lengths)])
    bench.finish()
    assert {ended.left for ended in bench.ended.values()} == {max(lengths) - 1}


def test_a_static_batch_waits_until_it_is_full_or_nobody_else_comes():
    bench = Bench(Static())
    bench.step([request(index) for index in range(SLOTS - 1)])
    assert bench.active == [set()]
    assert bench.step([request(SLOTS - 1)]) == [0, 1, 2, 3]
    bench.step([request(4)])
    assert bench.active[-1] == set()
    assert bench.step(last_call=True) == [4]


def test_a_static_batch_does_not_wait_for_more_rows_than_the_window_takes():
    bench = Bench(Static(), lookahead=2)
    assert bench.step([request(0), request(1)]) == [0, 1]


def test_a_static_batch_does_not_wait_beyond_the_starvation_limit():
    bench = Bench(Static(), starvation_limit_s=2.0)
    bench.step([request(0)])
    assert [bench.step() for _ in range(3)] == [[], [], [0]]


def test_a_finished_row_keeps_its_slot_until_its_batch_ends_and_is_not_active():
    bench = Bench(Static())
    lengths = (1, 2, 3, 3)
    bench.step([request(index, length) for index, length in enumerate(lengths)])
    assert bench.scheduler.running == 3
    assert bench.step([request(4)]) == []
    assert bench.active == [{0, 1, 2, 3}, {1, 2, 3}]
    assert bench.step() == [0, 1, 2, 3]


def test_a_finished_row_that_keeps_its_slot_holds_no_memory_and_is_unfinished():
    bench = Bench(Static(), slots=2)
    bench.step([request(0, 1), request(1, 3)])
    assert bench.scheduler.blocks.used == 1
    unfinished = {each.request.id.index: each for each in bench.scheduler.unfinished()}
    assert sorted(unfinished) == [0, 1]
    assert list(unfinished[0].output) == [1]


def test_the_latency_of_a_row_lasts_until_its_batch_ends():
    bench = Bench(Static(), slots=2)
    bench.step([request(0, 1), request(1, 4)])
    bench.finish()
    assert [bench.completions[index].decode_s for index in (0, 1)] == [3.0, 3.0]


def test_a_batch_whose_prompts_take_several_steps_is_one_batch():
    bench = Bench(Static(), budget=SLOTS, slots=2)
    long_prompt = Request(RowId("s", 0), [7] * 10, Sampling(1))
    assert bench.step([request(1), long_prompt]) == []
    assert [bench.step(), bench.step()] == [[], [0, 1]]


def test_a_batch_does_not_end_before_all_of_it_have_started():
    bench = Bench(Static(), budget=SLOTS, slots=2)
    rows = [Request(RowId("s", index), [index] * SLOTS, Sampling(1)) for index in range(2)]
    assert [bench.step(rows), bench.step()] == [[], [0, 1]]


def test_a_dynamic_batch_starts_at_its_preferred_size_or_after_the_delay():
    bench = Bench(made("dynamic", preferred=2))
    assert bench.step([request(0)]) == []
    assert bench.step([request(1)]) == [0, 1]
    assert bench.step([request(2)]) == []
    assert [bench.step() for _ in range(3)] == [[], [], [2]]


def test_those_who_wait_at_the_gate_are_let_in_together_and_pass_as_slots_free():
    bench = Bench(made("gated", preferred=3, delay_s=100.0), slots=2)
    bench.step([request(0, 2), request(1, 2)])
    assert bench.active[-1] == set()
    bench.step([request(2, 2)])
    assert bench.active[-1] == {0, 1}
    bench.step([request(3, 2)])
    bench.step()
    assert bench.active[-1] == {2}
    assert bench.scheduler.waiting == 1


def test_max_8_six_running_two_done_five_waiting_four_join():
    bench = Bench(Continuous(), slots=8)
    bench.step([request(index, 1 if index < 2 else 9) for index in range(6)])
    bench.step([request(index, 9) for index in range(6, 11)])
    assert bench.active[-1] == set(range(2, 10))
    assert bench.scheduler.waiting == 1


@pytest.mark.parametrize("name", POLICIES)
def test_under_an_endless_stream_of_high_priority_rows_every_row_ends(name):
    bench = Bench(made(name), starvation_limit_s=20.0)
    bench.step([request(index, 3, priority=5) for index in range(6)])
    for step in range(120):
        # two slots' worth of rows too many
        urgent = [request(1_000 + 4 * step + index, 3) for index in range(2)]
        bench.step(urgent)
    assert all(index in bench.ended for index in range(6))
    assert max(bench.ended[index].left for index in range(6)) > 20


def test_the_door_says_when_it_opens_by_itself():
    door = Door(SLOTS, 0, 1, 1.0, last_call=False)
    assert made("gated").opens_in_s(door) == 2.0
    assert made("dynamic").opens_in_s(door) == 2.0
    assert made("static").opens_in_s(door) == float("inf")
    assert made("continuous").opens_in_s(door) == 0.0


@pytest.mark.parametrize(
    ("name", "delay_s", "kind"),
    [
        ("static", 0.0, Static),
        ("dynamic", 0.0, Dynamic),
        ("continuous", 0.0, Continuous),
        ("continuous", 0.5, Gated),
    ],
)
def test_a_job_file_names_the_policy(name, delay_s, kind):
    assert type(policy_named(name, max_queue_delay_s=delay_s)) is kind
