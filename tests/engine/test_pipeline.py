"""The host one step ahead of a fake device: the same texts, sooner; a late token goes nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.plan import Plan
from jobrunner.engine.policies import Continuous, Door, policy_named
from jobrunner.engine.preemption import Preemption
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.swap import HostBlocks
from jobrunner.engine.tuning import Tuning
from jobrunner.records import Completion, Partial, Request, RowId, Sampling, Step
from tests.fakes import FakeDevice, FakeRequests, LetterText, StillClock
from tests.properties import examples

SETTINGS = examples(120)


class SlowScheduler(Scheduler):
    """Takes its time to plan, and keeps what it planned."""

    def __init__(self, clock: StillClock, host_s: float, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.plans: list[Plan] = []
        self.events: list[str] = []
        self._clock = clock
        self._host_s = host_s

    def plan(self, now: float, *, last_call: bool = False) -> Plan:
        self.events.append("plan")
        self._clock.now += self._host_s
        self.plans.append(super().plan(now, last_call=last_call))
        return self.plans[-1]


class Bench:
    """An engine on a fake device that checks itself after every step."""

    scheduler_type: type[SlowScheduler] = SlowScheduler
    device_type: type[FakeDevice] = FakeDevice

    def __init__(
        self,
        *,
        ahead: bool = True,
        blocks: int = 100,
        block_size: int = 4,
        batch: int = 4,
        budget: int = 16,
        host: int = 0,
        step_s: float = 1.0,
        host_s: float = 0.0,
        policy: str = "continuous",
        make_device: Callable[..., FakeDevice] | None = None,
        tuning: Tuning | None = None,
        **device: Any,
    ) -> None:
        self.clock = StillClock()
        self.host = HostBlocks(host)
        pool = Blocks(blocks, block_size)
        self.scheduler = self.scheduler_type(
            self.clock,
            host_s,
            pool,
            Limits(batch, budget, budget, lookahead=8),
            lambda: LetterText(lambda token: f"{token} "),
            policy=policy_named(policy),
            preemption=Preemption("swap" if host else "recompute", self.host),
        )
        make = make_device or self.device_type
        self.device = make(pool, self.clock, ahead=ahead, step_s=step_s, **device)
        self.device.events = self.scheduler.events
        self.engine = Engine(self.scheduler, self.device, self.clock, tuning=tuning)

    def serve(
        self, requests: Sequence[Request], arrivals: Sequence[int] = (), stop_after: int = 10**6
    ) -> list[Step]:
        steps = []
        for step in self.engine.run(FakeRequests(requests, arrivals)):
            self.scheduler.check()
            steps.append(step)
            if len(steps) == stop_after:
                return steps
        assert self.scheduler.blocks.used == 0
        assert self.host.free == self.host.count
        return steps


def request(index: int, prompt: Sequence[int], max_new_tokens: int = 5, **more: Any) -> Request:
    sampling = Sampling(max_new_tokens, stop_ids=more.pop("stop_ids", frozenset({0})), **more)
    return Request(RowId("s", index), prompt, sampling)


def endless(index: int, length: int, **more: Any) -> Request:
    """A row that its limit ends."""
    return request(index, [index + 1] * 3, length, stop_ids=frozenset(), **more)


def completions(steps: Sequence[Step]) -> dict[int, Completion]:
    done = [completion for step in steps for completion in step.completions]
    assert len({completion.id for completion in done}) == len(done), "a row ended twice"
    return {completion.id.index: completion for completion in done}


def texts(steps: Sequence[Step]) -> dict[int, tuple[Any, ...]]:
    return {
        index: (list(done.tokens), list(done.logprobs), done.finish_reason, done.stop_string)
        for index, done in completions(steps).items()
        if done.error is None
    }


rows = st.lists(
    st.builds(
        dict,
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=24),
        max_new_tokens=st.integers(1, 25),
        temperature=st.sampled_from([0.0, 1.0]),
        stop=st.sampled_from([(), ("7 ", "1"), ("3",)]),
        stop_on_repetition=st.sampled_from([0, 0, 3]),
        min_new_tokens=st.sampled_from([0, 0, 4]),
        logprobs=st.sampled_from([None, None, 2]),
        repetition_penalty=st.sampled_from([1.0] * 9 + [1.5]),
        priority=st.sampled_from([0, 0, 1]),
    ),
    min_size=1,
    max_size=10,
)
machines = st.builds(
    dict,
    blocks=st.integers(7, 24),
    block_size=st.integers(1, 6),
    batch=st.integers(1, 5),
    budget=st.integers(5, 24),
    host=st.sampled_from([0, 4, 50]),
    policy=st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
    vocabulary=st.sampled_from([range(40), range(8)]),
)


def as_requests(rows: Sequence[dict[str, Any]]) -> list[Request]:
    requests = []
    for index, row in enumerate(rows):
        row = dict(row)
        priority = row.pop("priority")
        requests.append(
            replace(
                request(index, row.pop("prompt"), row.pop("max_new_tokens"), **row),
                priority=priority,
            )
        )
    return requests


@SETTINGS
@given(rows=rows, machine=machines, arrivals=st.lists(st.integers(0, 3), max_size=20))
def test_every_row_ends_as_it_does_with_the_pipeline_off(rows, machine, arrivals):
    requests = as_requests(rows)
    plain, ahead = Bench(ahead=False, **machine), Bench(**machine)
    expected = texts(plain.serve(requests, arrivals))
    assert texts(ahead.serve(requests, arrivals)) == expected
    assert "collect" not in plain.scheduler.events
    for row in requests:
        if row.sampling.stop or row.sampling.stop_on_repetition or row.id.index not in expected:
            continue
        assert expected[row.id.index][0] == ahead.device.alone(row)


@SETTINGS
@given(rows=rows, machine=machines, stop_after=st.integers(1, 40))
def test_what_a_kill_leaves_is_known_and_goes_on_to_the_same_end(rows, machine, stop_after):
    requests = as_requests(rows)
    expected = texts(Bench(ahead=False, **machine).serve(requests))
    killed = Bench(**machine)
    steps = killed.serve(requests, stop_after=stop_after)
    left: dict[int, Partial] = {each.id.index: each for each in killed.engine.partials()}
    done = completions(steps)
    assert not left.keys() & done.keys()
    assert all(each.tokens for each in left.values())
    kept = sum(len(each.tokens) for each in (*left.values(), *done.values()))
    lost = sum(each.error is not None for each in done.values())
    assert lost or sum(step.output_tokens for step in steps) == kept
    resumed = [
        replace(row, output=left[index].tokens, logprobs=left[index].logprobs)
        if index in left
        else row
        for index, row in enumerate(requests)
        if index not in done
    ]
    assert texts(steps) | texts(Bench(**machine).serve(resumed)) == expected


class Shut(Continuous):
    """Lets nobody in, though it says that the door is open."""

    def joining(self, door: Door) -> int:
        return 0


def test_an_engine_that_never_goes_on_says_so_and_ends():
    bench = Bench()
    bench.scheduler._policy = Shut()
    with pytest.raises(RuntimeError, match="nothing runs, and none of 2 rows may"):
        bench.serve([endless(0, 4), endless(1, 4)])


def test_the_next_step_is_planned_and_launched_before_the_last_is_collected():
    bench = Bench()
    bench.serve([endless(0, 4)])
    assert bench.scheduler.events[:6] == ["plan", "launch"] * 2 + ["collect", "plan"]
    launched = collected = 0
    for event in bench.scheduler.events[:-2]:
        launched += event == "launch"
        collected += event == "collect"
        if event == "collect" and launched < 4:
            assert launched == collected + 1
    # the last one is known to be the last
    assert Counter(bench.scheduler.events)["launch"] == 4


@pytest.mark.parametrize(("device_s", "host_s"), [(5.0, 2.0), (2.0, 5.0), (3.0, 3.0)])
def test_planning_costs_no_time_beside_a_slower_device(device_s: float, host_s: float):
    took = {}
    for ahead in (False, True):
        bench = Bench(ahead=ahead, step_s=device_s, host_s=host_s)
        steps = bench.serve([endless(0, 100)])
        assert sum(step.output_tokens for step in steps) == 100
        assert sum(step.step_s for step in steps) == bench.clock.now
        took[ahead] = bench.clock.now
    assert took[False] == 100 * (device_s + host_s)
    # the first plan has no step to hide behind, the last step no plan to hide
    assert took[True] <= 100 * max(device_s, host_s) + device_s + 2 * host_s


def test_a_step_reports_the_time_of_the_device_whoever_is_slower():
    for host_s in (0.5, 9.0):
        steps = Bench(step_s=2.0, host_s=host_s).serve([endless(0, 10)])
        assert {step.forward_s for step in steps} == {2.0}


def test_a_device_that_tells_no_time_is_timed_from_one_end_to_the_next():
    steps = Bench(step_s=2.0, host_s=0.5, tells_time=False).serve([endless(0, 10)])
    assert [step.forward_s for step in steps] == [2.0] * 10


def test_the_token_after_the_end_is_discarded_and_counts_for_nothing():
    bench = Bench(output_length=lambda prompt: 3)
    steps = bench.serve([request(0, [1, 2], 10)])
    done = completions(steps)[0]
    assert list(done.tokens) == bench.device.alone(request(0, [1, 2], 10))
    assert [step.output_tokens for step in steps] == [1, 1, 1, 0]
    assert [step.batch_size for step in steps] == [1, 1, 1, 0]
    assert [step.tokens_padded for step in steps] == [0, 0, 0, 1]
    assert [step.tokens_computed for step in steps] == [2, 1, 1, 1]
    assert [len(step.completions) for step in steps] == [0, 0, 1, 0]
    assert bench.device.late_tokens == 1


def test_the_blocks_of_an_ended_text_are_free_when_its_last_step_is_complete():
    bench = Bench(output_length=lambda prompt: 3)
    used = []
    for _ in bench.engine.run(FakeRequests([request(0, [1, 2], 10)])):
        bench.scheduler.check()
        used.append(bench.scheduler.blocks.used)
    assert used == [1, 1, 2, 0]


def test_a_text_that_its_limit_ends_computes_nothing_late():
    for length in (1, 2, 7):
        bench = Bench()
        steps = bench.serve([endless(0, length)])
        assert len(steps) == length
        assert sum(step.tokens_padded for step in steps) == 0


def test_a_slot_goes_to_the_next_row_though_the_late_token_is_still_computed():
    bench = Bench(batch=1, output_length=lambda prompt: 3)
    steps = bench.serve([request(0, [1, 2], 10), request(1, [3, 4], 10)])
    # the late step of the first row and the first step of the second follow each other
    assert len(steps) == 3 + 1 + 3 + 1
    assert sum(step.tokens_padded for step in steps) == 2


def test_what_is_being_generated_is_not_shared():
    bench = Bench(block_size=2, batch=2, output_length=lambda prompt: 6)
    first = request(0, [1, 2, 3], 10)
    output = bench.device.alone(first)
    again = replace(request(1, [1, 2, 3], 10), output=output[:4])
    steps = bench.serve([first, again], [1, 0, 0, 0, 0, 1])
    assert {tuple(done.tokens) for done in completions(steps).values()} == {tuple(output)}
    assert sum(step.tokens_cached for step in steps) == 2


def test_rows_with_penalties_are_computed_step_by_step():
    bench = Bench()
    bench.serve([endless(0, 5), endless(1, 3, presence_penalty=1.0)])
    events = bench.scheduler.events
    assert events[:9] == ["plan", "launch", "collect"] * 3
    # when the penalised row is gone, the host is ahead again
    assert events[9:13] == ["plan", "launch", "plan", "launch"]


def test_all_is_collected_before_anybody_gives_way():
    bench = Bench(blocks=9, batch=3, host=20)
    steps = bench.serve([endless(index, 12) for index in range(3)])
    assert sum(step.preemptions for step in steps) > 0
    in_flight = 0
    plans = iter(bench.scheduler.plans)
    for event in bench.scheduler.events:
        in_flight += (event == "launch") - (event == "collect")
        if event == "plan":
            assert next(plans).preemptions == 0 or in_flight == 0


def test_a_higher_band_gets_its_slot_though_the_host_is_ahead():
    bench = Bench(batch=1)
    low = replace(endless(0, 30), priority=1)
    steps = bench.serve([low, endless(1, 3)], [1, 0, 1])
    ended = [done.id.index for step in steps for done in step.completions]
    assert ended == [1, 0]
    assert sum(step.preemptions for step in steps) == 1
