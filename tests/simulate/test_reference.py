"""The simulator against a slow obvious scheduler, with memory for everybody."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.config import BatchingTable
from jobrunner.console.snapshot import Totals
from jobrunner.console.stats import Stats
from jobrunner.engine.scheduler import Limits
from jobrunner.simulate.cost import StepCost
from jobrunner.simulate.trace import TraceRow
from jobrunner.simulate.virtual import Machine, simulate
from tests.properties import examples

PREFERRED, DELAY_S = 2, 2.5
POLICIES = {
    "continuous": {"policy": "continuous"},
    "gated": {"policy": "continuous"},
    "static": {"policy": "static"},
    "dynamic": {"policy": "dynamic"},
}
GATHERED = {"preferred_batch_size": PREFERRED, "max_queue_delay": f"{DELAY_S}s"}


@dataclass
class Seen:
    """What was computed: steps, tokens of each step, active rows of all steps, ends by row."""

    steps: int = 0
    tokens: list[int] = field(default_factory=list)
    active: int = 0
    ended_s: dict[int, float] = field(default_factory=dict)


def reference(rows: list[TraceRow], name: str, slots: int, budget: int, chunk: int) -> Seen:
    """Walk all lists in every step of a second; a row joins the first step after it arrived."""
    together = name in ("static", "dynamic")
    seen, now = Seen(), 0.0
    coming, line, slot_of, let_in = list(range(len(rows))), list[int](), list[int](), set[int]()
    prompt = [row.prompt for row in rows]
    output = [row.output for row in rows]
    while len(seen.ended_s) < len(rows):
        line += [index for index in coming if rows[index].arrival_s <= now]
        coming = [index for index in coming if rows[index].arrival_s > now]
        oldest_s = now - rows[line[0]].arrival_s if line else 0.0
        gathered = len(line) >= PREFERRED or (bool(line) and oldest_s >= DELAY_S) or not coming
        full = len(line) >= slots
        opens = {
            "continuous": True,
            "gated": gathered,
            "static": full or not coming,
            "dynamic": full or gathered,
        }[name]
        if opens and not together:
            let_in |= set(line)
        elif opens and not slot_of and not let_in & set(line):
            let_in |= set(line[:slots])
        left, computed, tokens = budget, dict[int, int](), 0
        for index in sorted(slot_of, key=lambda index: prompt[index] > 0):
            if output[index] > 0:
                computed[index] = min(max(1, prompt[index]), chunk, left)
                left -= computed[index]
        while left and len(slot_of) < slots and line and line[0] in let_in:
            index = line.pop(0)
            slot_of.append(index)
            computed[index] = min(prompt[index], chunk, left)
            left -= computed[index]
        computed = {index: count for index, count in computed.items() if count}
        if not computed:
            times = [rows[index].arrival_s for index in coming[:1]]
            if line and name in ("gated", "dynamic"):
                times.append(rows[line[0]].arrival_s + DELAY_S)
            now = min(times)
            continue
        now += 1.0
        seen.steps += 1
        seen.active += len(computed)
        for index, count in computed.items():
            tokens += count
            prompt[index] = max(0, prompt[index] - count)
            output[index] -= prompt[index] == 0
        seen.tokens.append(tokens)
        done = [index for index in slot_of if output[index] == 0]
        if not together or (len(done) == len(slot_of) and not let_in & set(line)):
            seen.ended_s |= dict.fromkeys(done, now)
            slot_of = [index for index in slot_of if index not in done]
    return seen


def simulated(rows: list[TraceRow], name: str, slots: int, budget: int, chunk: int) -> Seen:
    more = GATHERED if name in ("gated", "dynamic") else {}
    machine = Machine(
        cost=StepCost(step_s=1.0),
        limits=Limits(slots, budget, chunk, 1000),
        kv_blocks=1_000_000,
        batching=BatchingTable(order="input", **POLICIES[name], **more),
        max_new_tokens=1000,
    )
    stats = Stats(Totals(len(rows)), slots=slots, started_s=0.0)
    seen = Seen()
    for moment in simulate(rows, machine):
        step = moment.step
        stats.observe(step, moment.ended_s)
        seen.ended_s |= {done.id.index: moment.ended_s for done in step.completions}
        if step.batch_size:
            seen.steps += 1
            seen.tokens.append(step.prefill_tokens + step.decode_tokens)
            seen.active += step.batch_size
    snapshot = stats.snapshot(max(seen.ended_s.values()))
    assert snapshot.steps == seen.steps
    assert snapshot.utilization == pytest.approx(seen.active / (slots * seen.steps))
    return seen


@examples(400)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=14),
    gaps=st.lists(st.sampled_from([0, 1, 4]), min_size=14, max_size=14),
    slots=st.integers(1, 5),
    more_budget=st.integers(0, 20),
    chunk=st.integers(1, 25),
)
def test_every_step_is_the_one_that_the_definition_says(
    name, lengths, gaps, slots, more_budget, chunk
):
    at_s, rows = 0.0, []
    for place, (prompt, output) in enumerate(lengths):
        # no arrival falls on the end of a step, nor on the end of a delay
        at_s += gaps[place] + (0.013 if gaps[place] else 0.0)
        rows.append(TraceRow(prompt, output, at_s))
    budget = slots + more_budget
    expected = reference(rows, name, slots, budget, chunk)
    found = simulated(rows, name, slots, budget, chunk)
    assert (found.steps, found.tokens, found.active) == (
        expected.steps,
        expected.tokens,
        expected.active,
    )
    assert found.ended_s == pytest.approx(expected.ended_s)


@examples(100)
@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    slots=st.integers(1, 12),
    budget=st.integers(12, 30),
)
def test_prompts_fill_the_budget_exactly_while_there_are_prompts_and_slots(prompts, slots, budget):
    rows = [TraceRow(prompt, 1) for prompt in prompts]
    found = simulated(rows, "continuous", slots, budget, budget)
    left = sum(prompts)
    for tokens in found.tokens:
        assert tokens <= budget
        left -= tokens
    assert left == 0
    if slots >= len(prompts):
        assert found.tokens[:-1] == [budget] * (math.ceil(sum(prompts) / budget) - 1)
