"""Simulations small enough to compute by hand, and rules that hold for all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.config import BatchingTable
from jobrunner.console.snapshot import Snapshot, Totals
from jobrunner.console.stats import Stats
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.tuning import Automatic, Tuning
from jobrunner.records import Step
from jobrunner.simulate.cost import StepCost
from jobrunner.simulate.timeline import Timeline, text
from jobrunner.simulate.trace import TraceRow
from jobrunner.simulate.virtual import Machine, Moment, simulate
from jobrunner.simulate.window import Middle, Window
from tests.properties import examples

SECOND = StepCost(step_s=1.0)
FIXED = Automatic()


def machine(
    slots: int,
    *,
    cost=SECOND,
    budget=1000,
    blocks=1000,
    workers=1,
    automatic=FIXED,
    **batching,
) -> Machine:
    return Machine(
        cost=cost,
        limits=Limits(slots, budget, budget, 1000),
        kv_blocks=blocks,
        batching=BatchingTable(**{"order": "input", **batching}),
        max_new_tokens=1000,
        workers=workers,
        automatic=automatic,
    )


def rows_of(*outputs: int, arrivals: tuple[float, ...] = ()) -> list[TraceRow]:
    times = arrivals or (0.0,) * len(outputs)
    return [TraceRow(1, output, at_s) for output, at_s in zip(outputs, times, strict=True)]


def counted(rows: list[TraceRow], of: Machine) -> tuple[Snapshot, Middle, list[Moment]]:
    stats = Stats(Totals(len(rows)), slots=of.slots, started_s=0.0)
    window, moments = Window(), list(simulate(rows, of))
    for moment in moments:
        stats.observe(moment.step, moment.ended_s)
        window.observe(moment)
    ended_s = max((moment.ended_s for moment in moments), default=0.0)
    return stats.snapshot(ended_s), window.middle(), moments


def latencies(moments: list[Moment]) -> dict[int, float]:
    return {
        done.id.index: done.queue_s + done.prefill_s + done.decode_s
        for moment in moments
        for done in moment.step.completions
    }


def test_a_static_batch_lasts_as_long_as_its_longest_row():
    snapshot, _, moments = counted(rows_of(2, 4, 10), machine(3, policy="static"))
    assert snapshot.steps == 10
    assert snapshot.utilization == pytest.approx((2 + 4 + 10) / (3 * 10))
    assert snapshot.padding_efficiency == pytest.approx((2 + 4 + 10) / (3 * 10))
    assert latencies(moments) == {0: 10.0, 1: 10.0, 2: 10.0}


def test_two_static_batches_follow_each_other():
    snapshot, _, moments = counted(rows_of(2, 5, 3, 1), machine(2, policy="static"))
    assert snapshot.steps == 5 + 3
    assert snapshot.elapsed_s == 8.0
    assert latencies(moments) == {0: 5.0, 1: 5.0, 2: 8.0, 3: 8.0}


def test_in_a_continuous_batch_a_slot_is_filled_as_soon_as_it_is_free():
    snapshot, _, moments = counted(rows_of(3, 1, 2), machine(2))
    assert snapshot.steps == 3
    assert snapshot.utilization == 1.0
    assert snapshot.padding_efficiency == 1.0
    assert latencies(moments) == {0: 3.0, 1: 1.0, 2: 3.0}


def test_a_dynamic_batch_begins_when_enough_wait():
    rows = rows_of(2, 2, 2, arrivals=(0.0, 1.5, 9.0))
    gate = {"policy": "dynamic", "preferred_batch_size": 2, "max_queue_delay": "3s"}
    _, _, moments = counted(rows, machine(2, **gate))
    # the first two begin at 1.5 with the second; the last, after whom nobody comes, at once
    assert latencies(moments) == {0: 3.5, 1: 2.0, 2: 2.0}


def test_a_dynamic_batch_begins_when_the_oldest_has_waited_long_enough():
    rows = rows_of(2, 2, arrivals=(0.7, 90.3))
    gate = {"policy": "dynamic", "preferred_batch_size": 2, "max_queue_delay": "3s"}
    _, _, moments = counted(rows, machine(2, **gate))
    assert latencies(moments) == pytest.approx({0: 3.0 + 2.0, 1: 2.0})


def test_a_row_waits_from_its_arrival_and_not_from_the_next_step():
    _, _, moments = counted(rows_of(4, 1, arrivals=(0.0, 2.25)), machine(2))
    # it joins with the step from 3 to 4
    assert latencies(moments)[1] == pytest.approx(4.0 - 2.25)


def test_rows_that_arrive_later_do_not_keep_anyone_busy():
    snapshot, _, _ = counted(rows_of(2, 2, arrivals=(0.0, 100.0)), machine(2))
    assert snapshot.elapsed_s == pytest.approx(102.0)
    assert snapshot.busy_s == pytest.approx(4.0)


def test_a_long_prompt_is_cut_into_chunks_of_the_token_budget():
    rows = [TraceRow(10, 1)]
    snapshot, _, _ = counted(rows, machine(1, budget=4))
    assert snapshot.steps == 3


def test_a_prompt_takes_as_long_as_its_tokens_attend_to_others():
    cost = StepCost(step_s=1.0, attended_token_s=0.5)
    _, _, moments = counted([TraceRow(4, 1)], machine(1, cost=cost, budget=3))
    # the first three tokens attend to 1 + 2 + 3, the last one to 4
    assert [moment.step.attended_tokens for moment in moments] == [6, 4]
    assert [moment.step.step_s for moment in moments] == [1.0 + 3.0, 1.0 + 2.0]


def test_decodes_do_not_count_as_prompts_that_attend():
    snapshot, _, _ = counted([TraceRow(4, 5), TraceRow(2, 3)], machine(2))
    assert snapshot.attended_tokens == (1 + 2 + 3 + 4) + (1 + 2)


def test_the_longest_of_known_lengths_goes_first():
    rows = rows_of(1, 1, 9)
    known = replace(machine(1, order="longest"), known_lengths=True)
    ends = [done.id.index for m in simulate(rows, known) for done in m.step.completions]
    assert ends[0] == 2
    learnt = machine(1, order="longest")
    ends = [done.id.index for m in simulate(rows, learnt) for done in m.step.completions]
    assert ends[0] == 0


def test_the_last_rows_start_with_those_whose_like_got_long():
    # prompts of 100 tokens mostly bring 40, others 2; before the end that is learnt
    rows = [TraceRow(100 if place % 3 else 1, 40 if place % 3 else 2) for place in range(120)]
    auto, plain = (
        counted(rows, replace(machine(8, order=order), max_new_tokens=99))
        for order in ("auto", "input")
    )
    assert auto[1].tail_s < plain[1].tail_s / 2
    assert auto[0].elapsed_s < plain[0].elapsed_s


def test_a_huge_limit_lets_as_many_rows_run_as_a_usual_one():
    rows = [TraceRow(20, 60 + place % 80) for place in range(400)]
    runs = [
        [moment.step.running for moment in simulate(rows, replace(of, max_new_tokens=most))]
        for of in [machine(64, blocks=600, order="auto")]
        for most in (1000, 100_000)
    ]
    usual, huge = runs
    assert huge[:60] == usual[:60]
    assert len(huge) <= 1.02 * len(usual)


def test_between_the_first_full_batch_and_the_last_admission():
    # slots 2: steps {0,1} {0,2} {0,2} {0,3} {0}: full from the first step to the one 3 joins with
    _, middle, _ = counted(rows_of(5, 1, 2, 1), machine(2))
    assert middle.steps == 4
    assert middle.utilization == 1.0
    assert middle.tail_s == 5.0 - 3.0
    assert middle.tail_share == pytest.approx(2 / 5)


def test_a_batch_that_never_fills_has_no_middle():
    _, middle, _ = counted(rows_of(5, 1), machine(9))
    assert middle.utilization is None
    assert middle.steps == 0


ALL = Automatic(max_batch_size=True, token_budget=True, chunk_size=True, lookahead=True)
# what a token costs beside what a step does: the more together, the faster
SHARED = StepCost(step_s=0.010, prefill_token_s=0.0001, decode_s=0.0001)


def test_limits_that_are_left_to_the_machine_follow_its_steps():
    rows = [TraceRow(5, 20 + index % 7) for index in range(1500)]
    of = machine(8, cost=SHARED, budget=64, automatic=ALL)
    tuning, limits, seen = Tuning(of.limits, ALL), of.limits, set()
    for moment in simulate(rows, of):
        assert moment.limits == limits
        assert moment.step.running <= limits.max_batch_size
        assert moment.step.tokens_computed <= limits.token_budget
        limits = tuning.observe(moment.step) or limits
        seen.add(limits.max_batch_size)
    assert max(seen) > 8


def test_a_batch_that_may_grow_is_done_sooner_where_that_pays():
    rows = [TraceRow(5, 20 + index % 7) for index in range(1500)]
    _, _, fixed = counted(rows, machine(8, cost=SHARED, budget=64))
    _, _, grown = counted(rows, machine(8, cost=SHARED, budget=64, automatic=ALL))
    assert grown[-1].ended_s < 0.8 * fixed[-1].ended_s


def test_limits_given_as_numbers_stay():
    of = machine(8, cost=SHARED, budget=64)
    assert {moment.limits for moment in simulate([TraceRow(5, 20)] * 500, of)} == {of.limits}


def test_each_worker_finds_limits_of_its_own():
    rows = [TraceRow(5, 20 if index % 2 else 400) for index in range(400)]
    of = machine(8, cost=SHARED, budget=64, workers=2, automatic=ALL)
    sizes: dict[int, set[int]] = {0: set(), 1: set()}
    for moment in simulate(rows, of):
        sizes[moment.worker].add(moment.limits.max_batch_size)
    alone = machine(8, cost=SHARED, budget=64, automatic=ALL)
    assert sizes[1] == {each.limits.max_batch_size for each in simulate(rows[1::2], alone)}


def test_the_middle_counts_the_slots_that_there_were():
    window = Window()
    small, large = Limits(2, 9, 9, 9), Limits(4, 9, 9, 9)
    for limits, batch, joined in ((small, 2, 2), (large, 2, 0), (large, 4, 2), (large, 1, 0)):
        step = Step(batch_size=batch, running=batch, kv_blocks=1)
        window.observe(Moment(0, step, 0.0, 1.0, limits, joined, None))
    assert window.middle().utilization == (2 + 2 + 4) / (2 + 4 + 4)


def test_places_show_the_slots_of_a_batch_that_grew():
    rows = [TraceRow(5, 20 + index % 7) for index in range(1500)]
    of = machine(8, cost=SHARED, budget=64, automatic=ALL)
    timeline, most = Timeline(), 0
    for moment in simulate(rows, of, draw=True):
        if moment.places is not None:
            most = max(most, moment.step.running)
            timeline.add(moment.places)
    assert most > 8
    assert len(text(timeline, 1000, 9)) == most


def test_places_show_what_each_slot_did():
    of = machine(3, policy="static")
    timeline = Timeline(3)
    for moment in simulate(rows_of(3, 1, 2), of, draw=True):
        if moment.places is not None:
            timeline.add(moment.places)
    lines = text(timeline, 3, 9)
    assert sorted(lines) == sorted(["▓██", "▓█░", "▓░░"])


def test_workers_share_the_rows():
    snapshot, _, moments = counted(rows_of(*[3] * 8), machine(2, workers=2))
    assert snapshot.elapsed_s == 6.0
    assert {moment.worker for moment in moments} == {0, 1}
    assert snapshot.rows_done == 8


def test_more_workers_than_rows_end_as_well():
    snapshot, _, _ = counted(rows_of(2), machine(2, workers=3))
    assert snapshot.rows_done == 1


def test_no_rows_take_no_time():
    assert list(simulate([], machine(2))) == []


def test_a_row_that_never_fits_is_an_error():
    snapshot, _, _ = counted([TraceRow(100, 5), TraceRow(4, 2)], machine(2, blocks=2))
    assert snapshot.errors_by_kind == {"cannot_fit": 1}
    assert snapshot.rows_done == 2


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=25)
POLICIES = st.sampled_from(
    [
        {"policy": "static"},
        {"policy": "continuous"},
        {"policy": "dynamic", "preferred_batch_size": 2, "max_queue_delay": "1s"},
        {"policy": "continuous", "preferred_batch_size": 3, "max_queue_delay": "2s"},
    ]
)
EVERYTHING = StepCost(0.5, 0.01, 0.02, 0.001, 0.1, 0.25)


@examples(60)
@given(
    lengths=LENGTHS,
    gaps=st.lists(st.sampled_from([0.0, 0.3, 7.0]), min_size=25, max_size=25),
    slots=st.integers(1, 6),
    blocks=st.integers(5, 30),
    workers=st.integers(1, 3),
    batching=POLICIES,
    preemption=st.sampled_from(["auto", "swap", "recompute"]),
)
def test_every_row_is_done_once_and_time_is_the_sum_of_what_was_computed(
    lengths, gaps, slots, blocks, workers, batching, preemption
):
    arrivals = [sum(gaps[: place + 1]) for place in range(len(lengths))]
    rows = [TraceRow(*length, at_s) for length, at_s in zip(lengths, arrivals, strict=True)]
    of = machine(
        slots,
        cost=EVERYTHING,
        budget=24,
        blocks=blocks,
        workers=workers,
        preemption=preemption,
        **batching,
    )
    moments = list(simulate(rows, of))
    done = [completion for moment in moments for completion in moment.step.completions]
    assert sorted(completion.id.index for completion in done) == list(range(len(rows)))
    for completion in done:
        if completion.error is None:
            assert len(completion.tokens) == rows[completion.id.index].output
    for step in (moment.step for moment in moments if not moment.step.idle):
        decodes = step.decode_tokens + step.tokens_padded
        least_s = EVERYTHING.seconds(step.prefill_tokens, decodes, step.context_tokens)
        # what is swapped comes on top
        assert step.step_s >= least_s - 1e-9


@examples(20)
@given(
    lengths=LENGTHS,
    slots=st.integers(1, 6),
    batching=POLICIES,
    workers=st.integers(1, 3),
    automatic=st.sampled_from([FIXED, ALL]),
)
def test_the_same_rows_and_machine_give_the_same_steps(
    lengths, slots, batching, workers, automatic
):
    # enough of them to be tuned to
    rows = [TraceRow(*length, 0.4 * place) for place, length in enumerate(lengths * 10)]
    of = machine(
        slots, cost=EVERYTHING, budget=24, workers=workers, automatic=automatic, **batching
    )
    assert list(simulate(rows, of)) == list(simulate(rows, of))
