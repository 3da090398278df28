"""Equal requests are computed once, and each gets the answer that it would have got alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.duplicates import FOLLOWERS_PER_ROW, Duplicates
from jobrunner.engine.engine import Engine
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.records import Completion, Partial, Request, RowId, SampleId, Sampling, Step
from tests.fakes import FakeClock, FakeRequests, FakeRunner, LetterText
from tests.properties import examples

SETTINGS = examples(100)
STOP = frozenset({0})


def request(index: int, prompt: Sequence[int], **more) -> Request:
    sampling = Sampling(
        more.pop("max_new_tokens", 8),
        stop_ids=STOP,
        temperature=more.pop("temperature", 0.0),
        draw_key=more.pop("draw_key", f"row {index}".encode()),
        logprobs=more.pop("logprobs", None),
    )
    return Request(RowId("s", index), prompt, sampling, **more)


@dataclass
class Bench:
    """An engine on a fake model that computes duplicates once, or not."""

    duplicates: Duplicates | None = field(default_factory=Duplicates)
    blocks: int = 60
    batch: int = 4
    lookahead: int = 8

    def __post_init__(self) -> None:
        self.runner = FakeRunner(4)
        limits = Limits(self.batch, 16, 16, self.lookahead)
        self.scheduler = Scheduler(
            Blocks(self.blocks, 4), limits, lambda: LetterText(lambda token: f"{token} ")
        )
        self.engine = Engine(self.scheduler, self.runner, FakeClock(), duplicates=self.duplicates)

    def serve(self, requests: Sequence[Request], stop_after: int | None = None) -> list[Step]:
        steps: list[Step] = []
        for step in self.engine.run(FakeRequests(requests)):
            self.scheduler.check()
            if self.duplicates is not None:
                self.duplicates.check()
            steps.append(step)
            if len(steps) == stop_after:
                break
        return steps

    def answers(self, requests: Sequence[Request]) -> dict[SampleId, Completion]:
        return by_sample(self.serve(requests))


def by_sample(steps: Sequence[Step]) -> dict[SampleId, Completion]:
    done = [completion for step in steps for completion in step.completions]
    named = {SampleId(c.id, c.request.sample if c.request else 0): c for c in done}
    assert len(named) == len(done), "a sample ended twice"
    return named


def without_times(completion: Completion) -> Completion:
    return replace(
        completion,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        longest_gap_s=0.0,
        chunks=0,
        tokens=tuple(completion.tokens),
        logprobs=tuple(completion.logprobs),
    )


def test_equal_greedy_rows_are_computed_once_and_each_gets_the_answer():
    bench = Bench()
    rows = [request(index, [1, 2, 3]) for index in range(5)]
    steps = bench.serve(rows)
    expected = bench.runner.alone(rows[0])
    done = by_sample(steps)
    assert [list(done[SampleId(row.id)].tokens) for row in rows] == [expected] * 5
    assert [done[SampleId(row.id)].request for row in rows] == rows
    assert sum(step.output_tokens for step in steps) == len(expected)
    assert sum(step.tokens_computed for step in steps) == 3 + len(expected) - 1
    assert sum(step.duplicates for step in steps) == 4


def test_rows_with_the_same_own_seed_are_computed_once_and_others_are_not():
    for key, computed in ((b"seed", 1), (None, 3)):
        bench = Bench()
        more = {"temperature": 1.0} if key is None else {"temperature": 1.0, "draw_key": key}
        rows = [request(index, [1, 2, 3], **more) for index in range(3)]
        steps = bench.serve(rows)
        assert sum(step.duplicates for step in steps) == 3 - computed
        for row in rows:
            assert list(by_sample(steps)[SampleId(row.id)].tokens) == bench.runner.alone(row)


@pytest.mark.parametrize(
    "other", [{"max_new_tokens": 9}, {"logprobs": 1}, {"temperature": 0.5}, {"prompt": [1, 2, 4]}]
)
def test_rows_that_differ_in_what_decides_their_answer_are_each_computed(other):
    bench = Bench()
    rows = [request(0, [1, 2, 3]), request(1, **{"prompt": [1, 2, 3], **other})]
    assert sum(step.duplicates for step in bench.serve(rows)) == 0


def test_greedy_samples_of_a_row_are_computed_once():
    bench = Bench()
    rows = [request(0, [1, 2], sample=sample, samples=3) for sample in range(3)]
    done = bench.answers(rows)
    assert len(done) == 3
    assert bench.runner.tokens_computed == 2 + len(bench.runner.alone(rows[0])) - 1


def test_a_row_whose_equal_is_done_gets_the_answer_at_once():
    bench = Bench(lookahead=1, batch=1)
    rows = [request(0, [1, 2]), request(1, [5, 6]), request(2, [1, 2])]
    steps = bench.serve(rows)
    assert list(by_sample(steps)[SampleId(rows[2].id)].tokens) == bench.runner.alone(rows[0])
    assert sum(step.duplicates for step in steps) == 1


def test_answers_over_the_bound_are_forgotten_the_one_of_longest_ago_first():
    length = len(FakeRunner(4).alone(request(0, [1, 2]))) + 1
    for remembered, duplicates in ((length, 1), (length - 1, 0)):
        bench = Bench(Duplicates(remembered), lookahead=1, batch=1)
        steps = bench.serve([request(0, [1, 2]), request(1, [1, 2])])
        # the second comes while the first runs, or when its answer is remembered
        steps += bench.serve([request(2, [1, 2])])
        assert sum(step.duplicates for step in steps) == 1 + duplicates


def test_case_L_the_error_of_a_row_that_cannot_fit_is_that_of_its_equals():
    bench = Bench(blocks=2)
    rows = [request(index, [1] * 9) for index in range(2)]
    done = bench.answers(rows)
    errors = [done[SampleId(row.id)].error for row in rows]
    assert errors[0] is not None
    assert errors[0].kind == "cannot_fit"
    assert str(rows[1].id) in errors[1].message


def test_a_row_that_goes_on_with_its_own_tokens_does_not_wait_for_an_equal_one():
    bench = Bench()
    rows = [request(0, [1, 2]), request(1, [1, 2])]
    tokens = bench.runner.alone(rows[0])
    resumed = replace(rows[1], output=tokens[:2])
    bench.serve([rows[0], resumed], stop_after=1)
    assert {partial.id.index for partial in bench.engine.partials()} == {0, 1}


def test_a_row_that_goes_on_gets_a_known_answer_if_that_begins_with_its_tokens():
    runner = FakeRunner(4)
    tokens = runner.alone(request(0, [1, 2]))
    for output, duplicates in ((tokens[:2], 1), ([tokens[0], tokens[1] + 1], 0)):
        bench = Bench()
        bench.serve([request(0, [1, 2])])
        steps = bench.serve([request(1, [1, 2], output=output)])
        assert sum(step.duplicates for step in steps) == duplicates


def test_a_row_of_a_higher_priority_does_not_wait_for_a_lower_one():
    for priority, duplicates in ((0, 0), (1, 1), (2, 1)):
        rows = [request(0, [1, 2], priority=1), request(1, [1, 2], priority=priority)]
        assert sum(step.duplicates for step in Bench().serve(rows)) == duplicates


def test_a_row_whose_arrival_is_replayed_is_computed():
    rows = [request(0, [1, 2]), request(1, [1, 2], arrival_s=1.0)]
    computed, known = Duplicates().sift(rows, 0.0)
    assert (computed, known) == (rows, [])


def test_who_waits_for_an_answer_is_no_partial_and_shares_the_prompt():
    bench = Bench()
    rows = [request(index, [1, 2, 3]) for index in range(3)]
    bench.serve(rows, stop_after=2)
    assert [partial.id.index for partial in bench.engine.partials()] == [0]
    done = bench.answers([])
    prompts = [completion.request.prompt for completion in done.values() if completion.request]
    assert all(prompt is rows[0].prompt for prompt in prompts)


def test_who_waits_for_an_answer_counts_in_the_window():
    bench = Bench(lookahead=2)
    source = FakeRequests([request(index, [1, 2, 3]) for index in range(200)])
    assert bench.duplicates is not None
    waiting = [bench.duplicates.waiting for _ in bench.engine.run(source)]
    assert 0 < max(waiting) <= 2 * FOLLOWERS_PER_ROW


row_strategy = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([b"own", None]),
    st.integers(1, 12),
    st.sampled_from([None, 2]),
    st.integers(0, 2),
)


def rows_of(drawn: Sequence[tuple]) -> list[Request]:
    rows = []
    for index, (prompt, temperature, key, most, logprobs, priority) in enumerate(drawn):
        more = {} if key is None else {"draw_key": key}
        rows.append(
            request(
                index,
                prompt,
                temperature=temperature,
                max_new_tokens=most,
                logprobs=logprobs,
                priority=priority,
                **more,
            )
        )
    return rows


def resumed(row: Request, partials: Sequence[Partial]) -> Request:
    for partial in partials:
        if partial.id == row.id:
            return replace(row, output=partial.tokens, logprobs=partial.logprobs)
    return row


@SETTINGS
@given(
    drawn=st.lists(row_strategy, min_size=1, max_size=14),
    blocks=st.integers(2, 12),
    batch=st.integers(1, 4),
    lookahead=st.integers(1, 6),
    remembered=st.integers(0, 60),
    kills=st.lists(st.integers(1, 8), max_size=4),
)
def test_results_are_equal_with_and_without_duplicates_through_kills_and_scarce_memory(
    drawn, blocks, batch, lookahead, remembered, kills
):
    rows = rows_of(drawn)
    shape = {"blocks": blocks, "batch": batch, "lookahead": lookahead}
    expected = Bench(None, **shape).answers(rows)
    done: dict[SampleId, Completion] = {}
    partials: list[Partial] = []
    for stop_after in [*kills, None]:
        bench = Bench(Duplicates(remembered), **shape)
        left = [resumed(row, partials) for row in rows if SampleId(row.id) not in done]
        finished = by_sample(bench.serve(left, stop_after))
        assert not finished.keys() & done.keys(), "a sample ended twice"
        done |= finished
        partials = bench.engine.partials()
    original = {SampleId(row.id): row for row in rows}
    assert {
        sample: without_times(replace(completion, request=original[sample]))
        for sample, completion in done.items()
    } == {sample: without_times(completion) for sample, completion in expected.items()}


@SETTINGS
@given(drawn=st.lists(row_strategy, min_size=1, max_size=14), lookahead=st.integers(1, 6))
def test_no_two_equal_rows_of_one_priority_are_computed(drawn, lookahead):
    rows = [replace(row, priority=0) for row in rows_of(drawn)]
    bench = Bench(lookahead=lookahead)
    steps = bench.serve(rows)
    keys = {
        (tuple(row.prompt), replace(row.sampling, draw_key=key))
        for row in rows
        for key in [row.sampling.draw_key if row.sampling.temperature else b""]
    }
    assert sum(step.duplicates for step in steps) == len(rows) - len(keys)


def test_with_a_row_that_is_withdrawn_go_those_that_wait_for_its_answer():
    bench = Bench(batch=1)
    rows = [request(index, prompt) for index, prompt in enumerate([[1, 2], [5], [1, 2], [5], [7]])]
    source = FakeRequests(rows)
    run = bench.engine.run(source)
    done = list(next(run).completions)
    withdrawn = bench.engine.withdraw()
    assert [each.id.index for each in withdrawn] == [1, 3, 4]
    bench.duplicates.check()
    done += [completion for step in run for completion in step.completions]
    assert sorted(completion.id.index for completion in done) == [0, 2]
    assert sorted(bench.answers(withdrawn)) == [SampleId(rows[index].id) for index in (1, 3, 4)]
    bench.duplicates.check()
