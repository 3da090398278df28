"""A device without memory for a step: the step is computed again, smaller, and nothing is lost."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.config import BatchingTable
from jobrunner.engine import loading
from jobrunner.engine.plan import Drawn, OutOfMemoryError, Plan
from jobrunner.engine.runner import TransformersRunner
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.shortage import Shortage
from jobrunner.engine.tuning import Automatic, Tuning
from jobrunner.errors import InfrastructureError
from jobrunner.records import Step
from tests.engine.test_pipeline import (
    Bench,
    as_requests,
    completions,
    endless,
    machines,
    request,
    rows,
)
from tests.engine.test_transformers import generate, greedy, open_tiny, random_prompts
from tests.fakes import FakeDevice, FakeRequests, Launch
from tests.properties import examples

SETTINGS = examples(150)
# what nobody would have written
_SPOILT = -7


class ShortDevice(FakeDevice):
    """Has memory for steps of `most_tokens`, and `hitches` times none for one that also copies.

    Of a step that fails it does some of the copies, and where it gets past them it leaves wrong
    tokens in all places that the step writes.
    """

    def __init__(
        self,
        *arguments: Any,
        most_tokens: int = 10**6,
        hitches: int = 0,
        seed: int = 0,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self.failures: list[int] = []
        self._most_tokens = most_tokens
        self._hitches = hitches
        self._random = random.Random(seed)
        # done when what was launched before is computed
        self._behind: list[Callable[[], None]] = []

    def run(self, plan: Plan) -> Drawn:
        self._try(plan)
        return super().run(plan)

    def launch(self, plan: Plan) -> Launch:
        self._try(plan)
        return super().launch(plan)

    def collect(self, launch: Launch) -> Drawn:
        drawn = super().collect(launch)
        for work in self._behind:
            work()
        self._behind.clear()
        return drawn

    def _try(self, plan: Plan) -> None:
        hitch = self._hitches > 0 and len(plan.copies) > 0 and plan.tokens > 1
        if plan.tokens <= self._most_tokens and not hitch:
            return
        self._hitches -= hitch
        self.failures.append(plan.tokens)
        copied = self._random.randint(0, len(plan.copies))
        places = [
            (tuple(chunk.sequence.blocks), chunk.start, chunk.stop - chunk.start)
            for chunk in plan.chunks
        ]
        work = partial(self._spoil, plan.copies[:copied], places, copied == len(plan.copies))
        self._behind.append(work) if self._queue else work()
        raise OutOfMemoryError("no place", copied=copied)

    def _spoil(self, copies: Any, places: Any, computes: bool) -> None:
        for copy in copies:
            self._copy(copy)
        for blocks, start, length in places if computes else ():
            self._write(blocks, start, [_SPOILT] * length)


def ends(steps: list[Step]) -> dict[int, Any]:
    return {
        index: (list(done.tokens), list(done.logprobs), done.finish_reason, done.error)
        for index, done in completions(steps).items()
    }


@SETTINGS
@given(
    rows=rows,
    machine=machines,
    arrivals=st.lists(st.integers(0, 3), max_size=20),
    ahead=st.booleans(),
    most_tokens=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_every_row_ends_as_it_does_with_memory_for_all(
    rows, machine, arrivals, ahead, most_tokens, seed
):
    requests = as_requests(rows)
    plenty = Bench(ahead=ahead, **machine)
    expected = ends(plenty.serve(requests, arrivals))
    make = partial(ShortDevice, most_tokens=most_tokens, seed=seed)
    short = Bench(ahead=ahead, make_device=make, **machine)
    steps = short.serve(requests, arrivals)
    assert ends(steps) == expected
    assert max((step.tokens_computed for step in steps), default=0) <= most_tokens
    # each halves the budget, which begins at 24 at most
    assert len(short.device.failures) <= 5
    booked = sum(step.output_tokens for step in steps)
    lost = any(error is not None for *_, error in expected.values())
    assert lost or booked == sum(len(tokens) for tokens, *_ in expected.values())


crowded = st.lists(
    st.builds(
        dict,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_new_tokens=st.integers(8, 20),
        stop_ids=st.just(frozenset[int]()),
        priority=st.sampled_from([0, 1]),
    ),
    min_size=4,
    max_size=8,
)


@SETTINGS
@given(rows=crowded, ahead=st.booleans(), blocks=st.integers(8, 14), seed=st.integers(0, 2**16))
def test_copies_of_a_step_that_failed_are_carried_out_once(rows, ahead, blocks, seed):
    requests = as_requests(rows)
    machine = {"blocks": blocks, "block_size": 4, "batch": 6, "budget": 40, "host": 50}
    expected = ends(Bench(ahead=ahead, **machine).serve(requests))
    short = Bench(ahead=ahead, make_device=partial(ShortDevice, hitches=3, seed=seed), **machine)
    assert ends(short.serve(requests)) == expected


def test_what_failed_is_halved_and_said_once(caplog):
    make = partial(ShortDevice, most_tokens=10)
    bench = Bench(make_device=make, batch=16, budget=64)
    rows = [request(index, [1, index + 1, 3], 4, stop_ids=frozenset()) for index in range(16)]
    with caplog.at_level(logging.WARNING, "cbjob"):
        steps = bench.serve(rows)
    assert len(completions(steps)) == 16
    # 8 rows of 3 tokens are all that the window holds
    assert caplog.messages == [
        "out of memory in a step of 24 tokens of 8 rows: computed again with"
        " token_budget 64 -> 12, chunk_size 64 -> 12, max_batch_size 16 -> 12",
        "out of memory in a step of 12 tokens of 4 rows: computed again with"
        " token_budget 12 -> 6, chunk_size 12 -> 6, max_batch_size 12 -> 6; 2 rows give way",
    ]
    assert steps[-1].out_of_memory == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_of_decodes_that_has_no_memory_gives_way_by_half(ahead: bool):
    device = partial(ShortDevice, most_tokens=10**6)
    bench = Bench(ahead=ahead, make_device=device, batch=8, budget=64)
    rows = [endless(index, 12) for index in range(8)]
    steps = []
    for step in bench.engine.run(FakeRequests(rows)):
        bench.scheduler.check()
        steps.append(step)
        if len(steps) == 4:
            bench.device._most_tokens = 5
    assert bench.device.failures == [8]
    assert bench.scheduler.limits.token_budget == bench.scheduler.limits.max_batch_size == 4
    assert {index: list(done.tokens) for index, done in completions(steps).items()} == {
        row.id.index: bench.device.alone(row) for row in rows
    }


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_batch_that_stays_together_ends_though_its_places_become_fewer(policy: str):
    bench = Bench(
        make_device=partial(ShortDevice, most_tokens=3), policy=policy, batch=8, budget=64
    )
    steps = bench.serve([endless(index, 4 + index) for index in range(20)])
    assert len(completions(steps)) == 20


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_of_one_token_without_memory_ends_the_job(ahead: bool):
    bench = Bench(ahead=ahead, make_device=partial(ShortDevice, most_tokens=0))
    with pytest.raises(InfrastructureError, match="out of memory: no place") as raised:
        bench.serve([endless(0, 3)])
    assert raised.value.hint
    # 3, then 1
    assert bench.device.failures == [3, 1]


def test_tuning_never_goes_back_to_what_failed():
    limits = Limits(64, 512, 512, 256)
    every = Automatic(max_batch_size=True, token_budget=True, chunk_size=True, lookahead=True)
    tuning = Tuning(limits, every)
    lower = Shortage(tokens=500, rows=64).lowered(limits)
    assert lower == replace(limits, token_budget=250, chunk_size=250)
    tuning.lower(lower)
    lower = Shortage(tokens=60, rows=60).lowered(lower)
    assert lower == Limits(30, 30, 30, 256)
    tuning.lower(lower)
    found = [
        tuning.observe(
            Step(
                tokens_computed=tokens,
                batch_size=30,
                running=30,
                waiting=99,
                kv_blocks_used=1,
                kv_blocks=100,
                forward_s=1e-3,
                step_s=1e-3,
            )
        )
        for _ in range(300)
        for tokens in (30, 15)
    ]
    changed = [each for each in found if each is not None]
    assert all(max(each.token_budget, each.max_batch_size) <= 30 for each in changed)


def test_the_engine_tunes_on_from_the_lowered_limits():
    limits = Limits(4, 16, 16, lookahead=8)
    tuning = Tuning(limits, Automatic(max_batch_size=True, token_budget=True, chunk_size=True))
    bench = Bench(make_device=partial(ShortDevice, most_tokens=6), step_s=1.0, tuning=tuning)
    steps = bench.serve([endless(index, 40) for index in range(60)])
    assert len(completions(steps)) == 60
    assert len(bench.device.failures) <= 2
    assert bench.scheduler.limits.token_budget <= 6


class Narrow:
    """Lets a model compute all of a pass and then fail, at some of its passes."""

    def __init__(self, model: Any, fails_at: set[int]) -> None:
        self.tokens: list[int] = []
        self._fails_at = fails_at
        model.register_forward_hook(self._after, with_kwargs=True)

    def _after(self, model: Any, arguments: Any, given: dict[str, Any], out: Any) -> None:
        self.tokens.append(given["input_ids"].shape[1])
        if len(self.tokens) in self._fails_at:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("attention", ["torch", "reference"])
def test_a_real_model_gives_the_tokens_of_generate_through_shortages(
    llama: Path, monkeypatch: pytest.MonkeyPatch, attention: str, ahead: bool
):
    narrow: list[Narrow] = []

    def make(model: Any, *arguments: Any, **more: Any) -> TransformersRunner:
        narrow.append(Narrow(model, {9, 18}))
        return TransformersRunner(model, *arguments, ahead=ahead, **more)

    token_bytes = open_tiny(llama).kv_bytes_per_token
    monkeypatch.setattr(loading, "TransformersRunner", make)
    prompts = random_prompts(12)
    engine = open_tiny(
        llama,
        attention=attention,
        # so little that some are swapped
        kv_memory=24 * 4 * token_bytes,
        scheduling=BatchingTable(preemption="swap"),
        ahead=False,
    ).engine
    steps = list(engine.run(FakeRequests([greedy(*row) for row in enumerate(prompts)])))
    done = completions(steps)
    assert [list(done[index].tokens) for index in range(12)] == generate(llama, prompts)
    assert steps[-1].out_of_memory == 2
    assert sum(step.swapped_blocks for step in steps) > 0
    failed = narrow[0].tokens[8], narrow[0].tokens[17]
    assert max(narrow[0].tokens[18:]) <= failed[1] // 2 <= failed[0] // 4


def test_a_lack_of_memory_by_any_name_is_got_over(llama: Path, monkeypatch: pytest.MonkeyPatch):
    errors: list[Exception] = [
        MemoryError(),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ]
    logits = TransformersRunner.logits

    def fails(self: Any, packed: Any) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return logits(self, packed)

    engine = open_tiny(llama).engine
    monkeypatch.setattr(TransformersRunner, "logits", fails)
    prompts = [[1] * 15]
    steps = list(engine.run(FakeRequests([greedy(0, prompts[0])])))
    assert [list(completions(steps)[0].tokens)] == generate(llama, prompts)
    assert steps[0].prefill_tokens == 1
