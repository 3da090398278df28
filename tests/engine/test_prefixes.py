"""Rows with a common beginning that come at once wait for the first of them to compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.plan import Drawn, Plan
from jobrunner.engine.policies import Continuous, Policy, Static
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.records import Completion, Request, RowId, Sampling, Step
from tests.fakes import FakeClock, FakeRequests, FakeRunner, LetterText
from tests.properties import examples

BLOCK = 16
SETTINGS = examples(100)


def request(index: int, prompt: Sequence[int], output_tokens: int = 4, **more) -> Request:
    sampling = Sampling(output_tokens, temperature=1.0, draw_key=f"{index} {more}".encode())
    return Request(RowId("s", index), prompt, sampling, **more)


@dataclass
class Bench:
    """An engine on a fake model that counts what it computes and in which steps."""

    blocks: int = 4000
    block_size: int = BLOCK
    batch: int = 64
    budget: int = 512
    chunk: int = 512
    prefix_cache: bool = True
    policy: Policy | None = None

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.block_size)
        self.plans: list[Plan] = []
        self.scheduler = Scheduler(
            Blocks(self.blocks, self.block_size, self.prefix_cache),
            Limits(self.batch, self.budget, self.chunk, lookahead=1000),
            lambda: LetterText(lambda token: f"{token} "),
            policy=self.policy,
        )

    def run(self, plan: Plan) -> Drawn:
        self.plans.append(plan)
        return self.runner.run(plan)

    def serve(self, requests: Sequence[Request]) -> list[Step]:
        steps = []
        for step in Engine(self.scheduler, self, FakeClock()).run(FakeRequests(requests)):
            self.scheduler.check()
            steps.append(step)
        return steps

    @property
    def prompt_tokens_computed(self) -> int:
        return sum(plan.prefill_tokens for plan in self.plans)


def done(steps: Sequence[Step]) -> list[Completion]:
    return [completion for step in steps for completion in step.completions]


@pytest.mark.parametrize(
    ("length", "budget"), [(600, 8192), (600, 512), (592, 512), (593, 100), (15, 512)]
)
def test_samples_of_a_row_share_one_prefill_but_for_the_last_block(length, budget):
    bench = Bench(budget=budget, chunk=budget)
    steps = bench.serve([request(0, range(length), sample=s, samples=8) for s in range(8)])
    own = length - (length - 1) // BLOCK * BLOCK
    assert len(done(steps)) == 8
    assert bench.prompt_tokens_computed == length + 7 * own
    assert own <= BLOCK


def test_without_the_prefix_cache_each_sample_computes_its_prompt():
    bench = Bench(prefix_cache=False)
    bench.serve([request(0, range(60), sample=s, samples=8) for s in range(8)])
    assert bench.prompt_tokens_computed == 8 * 60


def test_a_system_prompt_is_computed_once_for_all_rows_that_have_it():
    system = [7] * 600
    rows = [request(index, [*system, 100 + index, 5, 6]) for index in range(500)]
    bench = Bench()
    assert len(done(bench.serve(rows))) == 500
    shared = 600 // BLOCK * BLOCK
    assert bench.prompt_tokens_computed == shared + 500 * (603 - shared)


def test_who_shares_nothing_of_what_is_computed_does_not_wait():
    bench = Bench(batch=3)
    rows = [request(0, [1] * 40), request(1, [1] * 40, sample=1), request(2, [2] * 40)]
    bench.serve(rows)
    first = [chunk.sequence.request.id.index for chunk in bench.plans[0].chunks]
    assert first == [0, 2]


def test_who_waits_for_a_prefix_has_a_slot():
    bench = Bench(batch=2)
    rows = [request(0, [1] * 40), request(1, [1] * 40), request(2, [2] * 40)]
    bench.serve(rows)
    started = [[chunk.sequence.request.id.index for chunk in p.chunks] for p in bench.plans[:2]]
    assert started == [[0], [0, 1]]


def test_it_waits_for_the_blocks_that_it_shares_and_no_longer():
    bench = Bench(budget=32, chunk=32)
    bench.serve([request(0, [1] * 32 + [2] * 64), request(1, [1] * 32 + [3] * 64)])
    starts = [[chunk.start for chunk in plan.chunks] for plan in bench.plans[:3]]
    # while the budget goes to the first prompt there is none left for the second
    assert starts == [[0], [32], [64]]
    bench = Bench(budget=64, chunk=32)
    bench.serve([request(0, [1] * 32 + [2] * 64), request(1, [1] * 32 + [3] * 64)])
    starts = [[chunk.start for chunk in plan.chunks] for plan in bench.plans[:2]]
    assert starts == [[0], [32, 32]]


def test_a_short_row_of_a_higher_priority_goes_before_one_that_waited_for_a_prefix():
    bench = Bench(batch=8)
    scheduler = bench.scheduler
    for row in (request(0, [1] * 40, priority=1), request(1, [1] * 40, priority=1)):
        scheduler.add(row, 0.0)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, bench.run(plan), 0.0)
    scheduler.add(request(2, [2] * 40, priority=0), 0.0)
    order = [chunk.sequence.request.id.index for chunk in scheduler.plan(0.0).chunks]
    assert order == [0, 2, 1]


def test_who_waits_for_a_prefix_keeps_no_slot_from_a_higher_priority_when_slots_become_fewer():
    bench = Bench(batch=4)
    scheduler = bench.scheduler
    for index in range(3):
        scheduler.add(request(index, [1] * 40, 1, priority=1), 0.0)
    # the first computes what the others wait for
    plan = scheduler.plan(0.0)
    assert len(plan) == 1
    scheduler.retune(Limits(1, 512, 512, lookahead=1000))
    scheduler.commit(plan, bench.run(plan), 0.0)
    assert scheduler.running == 0
    scheduler.add(request(3, [2] * 40, 1, priority=0), 0.0)
    order = []
    while scheduler.waiting:
        plan = scheduler.plan(0.0)
        scheduler.check()
        order += [chunk.sequence.request.id.index for chunk in plan.chunks]
        scheduler.commit(plan, bench.run(plan), 0.0)
    assert order == [3, 1, 2]


rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 12), st.lists(st.integers(0, 1), min_size=1, max_size=9)
    ),
    min_size=1,
    max_size=10,
)


@SETTINGS
@given(
    rows=rows_strategy,
    samples=st.integers(1, 3),
    blocks=st.integers(7, 20),
    batch=st.integers(1, 5),
    budget=st.integers(5, 24),
    chunk=st.integers(1, 24),
    policy=st.sampled_from([Continuous, Static]),
)
def test_every_sample_gets_its_tokens_however_prefixes_memory_and_slots_fall(
    rows, samples, blocks, batch, budget, chunk, policy
):
    bench = Bench(
        blocks=blocks,
        block_size=4,
        batch=batch,
        budget=max(batch, budget),
        chunk=chunk,
        policy=policy(),
    )
    requests = [
        request(index, [token] * length + tail, 6, sample=sample, samples=samples)
        for index, (token, length, tail) in enumerate(rows)
        for sample in range(samples)
    ]
    finished = done(bench.serve(requests))
    assert len(finished) == len(requests)
    for completion in finished:
        assert completion.request is not None
        assert list(completion.tokens) == bench.runner.alone(completion.request)


@examples(300)
@given(
    rows=rows_strategy,
    priorities=st.lists(st.integers(0, 2), min_size=10, max_size=10),
    arrivals=st.lists(st.integers(0, 3), max_size=12),
    blocks=st.integers(7, 20),
    slots=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    policy=st.sampled_from([Continuous, Continuous, Static]),
)
def test_every_row_gets_its_tokens_while_priorities_preempt_and_slots_come_and_go(
    rows, priorities, arrivals, blocks, slots, policy
):
    bench = Bench(blocks=blocks, block_size=4, batch=slots[0], budget=8, policy=policy())
    requests = [
        request(index, [token] * length + tail, 6, priority=priority)
        for index, ((token, length, tail), priority) in enumerate(
            zip(rows, priorities, strict=False)
        )
    ]
    finished = []
    engine = Engine(bench.scheduler, bench, FakeClock())
    for number, step in enumerate(engine.run(FakeRequests(requests, arrivals)), start=1):
        finished += step.completions
        bench.scheduler.check()
        bench.scheduler.retune(Limits(slots[number % len(slots)], 8, 8, lookahead=1000))
    assert len(finished) == len(requests)
    for completion in finished:
        assert list(completion.tokens) == bench.runner.alone(completion.request)


@SETTINGS
@given(rows=rows_strategy, batch=st.integers(1, 8), budget=st.integers(8, 64))
def test_with_memory_for_all_no_block_is_computed_twice(rows, batch, budget):
    bench = Bench(blocks=400, block_size=4, batch=batch, budget=budget, chunk=64)
    requests = [
        request(index, [token] * length + tail, 1)
        for index, (token, length, tail) in enumerate(rows)
    ]
    bench.serve(requests)
    prompts = [tuple(each.prompt) for each in requests]
    # the last token of a prompt is always computed, and with it the rest of its block
    heads = {p[:end] for p in prompts for end in range(4, len(p), 4)}
    tails = sum(len(p) - (len(p) - 1) // 4 * 4 for p in prompts)
    assert bench.prompt_tokens_computed <= 4 * len(heads) + tails
