"""Scheduling and the step loop on a fake model: every row ends, with the tokens it must have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.plan import Drawn, Plan
from jobrunner.engine.policies import Policy, Static
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.records import Completion, Partial, Request, RowId, Sampling, Step
from tests.fakes import FakeClock, FakeRequests, FakeRunner, LetterText
from tests.properties import examples

SETTINGS = examples(150)


def request(index: int, prompt: Sequence[int], max_new_tokens: int = 5, **more) -> Request:
    output = more.pop("output", ())
    sampling = Sampling(max_new_tokens, stop_ids=more.pop("stop_ids", frozenset({0})), **more)
    return Request(RowId("s", index), prompt, sampling, output)


class Bench:
    """An engine on a fake model that checks itself after every step."""

    def __init__(
        self,
        *,
        blocks: int = 100,
        block_size: int = 4,
        batch: int = 4,
        budget: int = 16,
        chunk: int = 16,
        lookahead: int = 8,
        prefix_cache: bool = True,
        output_length=None,
        policy: Policy | None = None,
    ) -> None:
        self.limits = Limits(batch, budget, chunk, lookahead)
        self.runner = FakeRunner(block_size, output_length=output_length)
        self.scheduler = Scheduler(
            Blocks(blocks, block_size, prefix_cache),
            self.limits,
            lambda: LetterText(lambda token: f"{token} "),
            policy=policy,
        )
        self.plans: list[Plan] = []
        self.engine = Engine(self.scheduler, self, clock=FakeClock())

    def run(self, plan: Plan) -> Drawn:
        check_plan(plan, self.limits)
        self.plans.append(plan)
        return self.runner.run(plan)

    def serve(self, requests: Sequence[Request], arrivals: Sequence[int] = ()) -> list[Step]:
        steps = []
        for step in self.engine.run(FakeRequests(requests, arrivals)):
            self.scheduler.check()
            assert step.tokens_computed == step.prefill_tokens + step.decode_tokens
            assert step.kv_blocks_used <= step.kv_blocks
            steps.append(step)
        assert self.scheduler.blocks.used == 0
        return steps


def check_plan(plan: Plan, limits: Limits) -> None:
    sizes = [chunk.stop - chunk.start for chunk in plan.chunks]
    assert sum(sizes) <= limits.token_budget
    assert all(1 <= size <= limits.chunk_size for size in sizes)
    assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
    kinds = [chunk.decode for chunk in plan.chunks]
    assert kinds == sorted(kinds, reverse=True), "a prompt came before a decode"
    for chunk, size in zip(plan.chunks, sizes, strict=True):
        left = len(chunk.sequence.tokens) - chunk.start
        if size < min(left, limits.chunk_size):
            assert sum(sizes) == limits.token_budget, "a chunk was cut though the budget had room"


def completions(steps: Sequence[Step]) -> dict[int, Completion]:
    done = [completion for step in steps for completion in step.completions]
    assert len({completion.id for completion in done}) == len(done), "a row ended twice"
    return {completion.id.index: completion for completion in done}


requests_strategy = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=30),
        st.integers(1, 25),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=12,
)


@SETTINGS
@given(
    rows=requests_strategy,
    arrivals=st.lists(st.integers(0, 3), max_size=20),
    blocks=st.integers(1, 14),
    block_size=st.integers(1, 6),
    batch=st.integers(1, 5),
    budget=st.integers(1, 20),
    chunk=st.integers(1, 20),
    lookahead=st.integers(1, 6),
    prefix_cache=st.booleans(),
)
def test_every_row_ends_with_the_tokens_it_gets_alone(
    rows, arrivals, blocks, block_size, batch, budget, chunk, lookahead, prefix_cache
):
    bench = Bench(
        blocks=blocks,
        block_size=block_size,
        batch=batch,
        budget=budget,
        chunk=chunk,
        lookahead=lookahead,
        prefix_cache=prefix_cache,
    )
    requests = []
    for index, (prompt, max_new_tokens, resumed) in enumerate(rows):
        fresh = request(index, prompt, max_new_tokens)
        output = bench.runner.alone(fresh)[:resumed]
        requests.append(Request(fresh.id, prompt, fresh.sampling, output))
    done = completions(bench.serve(requests, arrivals))
    assert sorted(done) == list(range(len(rows)))
    capacity = blocks * block_size
    for each in requests:
        expected = bench.runner.alone(each)
        completion = done[each.id.index]
        # the last token is sampled and never stored
        stored = len(each.prompt) + len(expected) - 1
        if stored > capacity and len(each.output) < len(expected):
            assert completion.error is not None
            assert completion.error.kind == "cannot_fit"
        else:
            assert completion.error is None
            assert list(completion.tokens) == expected
            ended = "stop" if expected[-1] == 0 else "length"
            assert completion.finish_reason == ended
            assert completion.prompt_tokens == len(each.prompt)


class Returning(FakeRequests):
    """A source that takes requests back."""

    def give_back(self, requests: Sequence[Request]) -> None:
        self._requests[:0] = requests


@SETTINGS
@given(rows=requests_strategy, at=st.integers(0, 20), blocks=st.integers(8, 14))
def test_who_is_withdrawn_never_ran_and_all_others_end_with_their_tokens(rows, at, blocks):
    bench = Bench(blocks=blocks, batch=3, lookahead=5)
    requests = [request(index, prompt, most) for index, (prompt, most, _) in enumerate(rows)]
    source = Returning(requests)
    steps, withdrawn = [], []
    for step in bench.engine.run(source):
        steps.append(step)
        if len(steps) == at:
            begun = {chunk.sequence.request.id for plan in bench.plans for chunk in plan.chunks}
            withdrawn = bench.engine.withdraw()
            assert not begun & {each.id for each in withdrawn}
            # those that are let in already wait for the prefix of one that runs
            left = {each.request.id for each in bench.scheduler.unfinished()} - begun
            assert len(left) <= 3
            source.give_back(withdrawn)
        bench.scheduler.check()
    assert [each.id.index for each in withdrawn] == sorted(each.id.index for each in withdrawn)
    done = completions(steps)
    assert sorted(done) == list(range(len(rows)))
    for each in requests:
        completion = done[each.id.index]
        assert completion.error or list(completion.tokens) == bench.runner.alone(each)


def test_a_batch_ends_though_all_that_it_waits_for_are_withdrawn():
    bench = Bench(batch=2, budget=4, chunk=4, policy=Static())
    run = bench.engine.run(FakeRequests([request(0, [1] * 4, 1), request(1, [2] * 4, 1)]))
    # the first is done, and its batch goes on with the other one, for which there was no token left
    assert not next(run).completions
    assert [each.id.index for each in bench.engine.withdraw()] == [1]
    bench.scheduler.check()
    assert [done.id.index for step in run for done in step.completions] == [0]


@SETTINGS
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=12),
            st.integers(0, 12),
            st.integers(0, 20),
            st.none() | st.integers(0, 3),
        ),
        min_size=1,
        max_size=5,
    ),
    samples=st.integers(1, 3),
    blocks=st.integers(9, 20),
    batch=st.integers(1, 5),
)
def test_every_sample_of_a_row_ends_with_its_own_tokens_and_log_probabilities(
    rows, samples, blocks, batch
):
    bench = Bench(blocks=blocks, batch=batch)
    requests = []
    for index, (prompt, min_new_tokens, resumed, logprobs) in enumerate(rows):
        for sample in range(samples):
            sampling = Sampling(
                20,
                temperature=1.0,
                stop_ids=frozenset({0, 1, 2, 3}),
                draw_key=bytes([sample]),
                min_new_tokens=min_new_tokens,
                logprobs=logprobs,
            )
            fresh = Request(RowId("s", index), prompt, sampling, sample=sample, samples=samples)
            count = resumed * (sample + 1) // samples
            requests.append(
                replace(
                    fresh,
                    output=bench.runner.alone(fresh)[:count],
                    logprobs=bench.runner.alone_logprobs(fresh)[:count],
                )
            )
    done = [completion for step in bench.serve(requests) for completion in step.completions]
    assert sorted((completion.id, completion.request.sample) for completion in done) == sorted(
        (request.id, request.sample) for request in requests
    )
    for completion in done:
        assert any(completion.request is request for request in requests)
        assert completion.error is None
        assert list(completion.tokens) == bench.runner.alone(completion.request)
        assert list(completion.logprobs) == bench.runner.alone_logprobs(completion.request)
        least = completion.request.sampling.min_new_tokens
        assert all(token > 3 for token in completion.tokens[:least])


def test_an_unshared_prompt_takes_as_many_full_chunks_as_it_must():
    for length in (15, 16, 17, 47, 48, 49):
        bench = Bench(budget=16, chunk=16)
        bench.serve([request(0, range(1, length + 1), 1)])
        sizes = [chunk.stop - chunk.start for plan in bench.plans for chunk in plan.chunks]
        assert len(sizes) == -(-length // 16)
        assert sum(sizes) == length


def test_decodes_go_first_and_prompts_fill_the_budget_exactly():
    bench = Bench(batch=3, budget=10, chunk=8, output_length=lambda prompt: 30)
    bench.serve([request(0, [1, 2], 30), request(1, range(40), 3), request(2, range(1, 41), 3)])
    first, second = (
        [chunk.stop - chunk.start for chunk in plan.chunks] for plan in bench.plans[:2]
    )
    assert first == [2, 8]
    assert second == [1, 8, 1]


def test_a_step_carries_a_row_from_prefill_to_decode_without_a_gap():
    bench = Bench(budget=4, chunk=4)
    steps = bench.serve([request(0, [1, 2, 3, 4, 5], 3, stop_ids=frozenset())])
    assert [(step.prefill_tokens, step.decode_tokens) for step in steps] == [
        (4, 0),
        (1, 0),
        (0, 1),
        (0, 1),
    ]
    assert [step.output_tokens for step in steps] == [0, 1, 1, 1]


def test_a_full_prefix_hit_still_computes_the_last_token():
    for length, cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        bench = Bench(block_size=4)
        steps = bench.serve([request(0, [1] * length, 1), request(1, [1] * length, 1)], [1, 0, 1])
        assert steps[-1].tokens_cached == cached
        assert steps[-1].prefill_tokens == length - cached


def test_a_shared_prefix_is_held_once():
    bench = Bench(block_size=4, batch=2, output_length=lambda prompt: 9)
    steps = bench.serve([request(0, [7] * 8 + [1], 9), request(1, [7] * 8 + [2], 9)], [1, 1])
    assert steps[1].tokens_cached == 8
    assert steps[1].kv_blocks_used == 4


def test_case_L_a_prompt_over_the_kv_memory_cannot_fit_and_the_rest_goes_on():
    bench = Bench(blocks=2, block_size=4)
    done = completions(bench.serve([request(0, [1] * 3), request(1, [1] * 9), request(2, [2] * 3)]))
    error = done[1].error
    assert error is not None
    assert error.kind == "cannot_fit"
    assert error.message == "row 1 of `s` needs KV memory for 9 tokens, capacity 8 tokens"
    assert done[0].error is None
    assert done[2].error is None


def test_a_row_that_outgrows_the_kv_memory_alone_cannot_fit():
    bench = Bench(blocks=2, block_size=4, output_length=lambda prompt: 50)
    done = completions(bench.serve([request(0, [1] * 6, 50), request(1, [1] * 6, 3)]))
    error = done[0].error
    assert error is not None
    assert error.message == "row 0 of `s` needs KV memory for 9 tokens, capacity 8 tokens"
    assert done[0].tokens == ()
    assert len(done[1].tokens) == 3


def test_memory_of_one_block_serves_what_fits_it_one_by_one():
    bench = Bench(blocks=1, block_size=8)
    requests = [request(index, [index] * 4, 5, stop_ids=frozenset()) for index in range(3)]
    steps = bench.serve(requests)
    assert {len(done.tokens) for done in completions(steps).values()} == {5}
    assert max(step.running for step in steps) == 1


def test_the_youngest_is_preempted_and_loses_no_token():
    bench = Bench(blocks=6, block_size=4, batch=2, prefix_cache=False)
    requests = [request(index, [index] * 8, 12, stop_ids=frozenset()) for index in range(2)]
    steps = bench.serve(requests)
    assert sum(step.preemptions for step in steps) == 1
    finished = [completion.id.index for step in steps for completion in step.completions]
    assert finished == [0, 1]
    recomputed = sum(step.tokens_recomputed for step in steps)
    assert recomputed > 8
    computed = sum(step.tokens_computed for step in steps)
    assert computed - recomputed == 2 * (8 + 12 - 1)


def test_preempted_rows_come_back_in_the_order_they_were_admitted():
    bench = Bench(blocks=9, block_size=4, batch=3, budget=24, prefix_cache=False)
    requests = [request(index, [index] * 8, 12, stop_ids=frozenset()) for index in range(3)]
    steps = bench.serve(requests)
    assert sum(step.preemptions for step in steps) == 2
    finished = [completion.id.index for step in steps for completion in step.completions]
    # the last admitted goes first, then the one with an empty block more; 0 returns before 2
    assert finished == [1, 0, 2]


def test_preempted_and_resumed_rows_go_before_new_ones():
    bench = Bench(batch=1)
    requests = [request(0, [5], 2), request(1, [6], 2), request(2, [7], 4, output=[1])]
    steps = bench.serve(requests, [3])
    finished = [done.id.index for step in steps for done in step.completions]
    assert finished == [2, 0, 1]


def test_a_resumed_row_continues_after_its_output_and_counts_it_as_prefill():
    bench = Bench()
    whole = request(0, [1, 2, 3], 6, stop_ids=frozenset())
    expected = bench.runner.alone(whole)
    resumed = Request(whole.id, whole.prompt, whole.sampling, expected[:4])
    steps = bench.serve([resumed])
    assert list(completions(steps)[0].tokens) == expected
    assert sum(step.prefill_tokens for step in steps) == 7
    assert sum(step.output_tokens for step in steps) == 2


def test_a_resumed_row_at_its_end_completes_without_a_forward_pass():
    bench = Bench()
    ended = [
        request(0, [1], 3, output=[4, 5, 6]),
        request(1, [1], 9, output=[4, 0]),
        request(2, [1], 9, output=[4, 5], stop=("5",)),
    ]
    steps = bench.serve(ended)
    assert bench.runner.steps == 0
    done = completions(steps)
    assert [done[index].tokens for index in range(3)] == [[4, 5, 6], [4, 0], [4, 5]]
    assert [done[index].finish_reason for index in range(3)] == ["length", "stop", "stop"]
    assert done[2].stop_string == "5"


def test_resumed_output_that_goes_past_its_end_is_cut_there():
    done = completions(Bench().serve([request(0, [1], 9, output=[4, 0, 5])]))[0]
    assert (done.tokens, done.finish_reason) == ([4, 0], "stop")


def test_case_S_a_stop_string_in_the_prompt_never_matches():
    bench = Bench(output_length=lambda prompt: 4)
    steps = bench.serve([request(0, [7, 7], 4, stop=("7 7",), stop_ids=frozenset())])
    assert completions(steps)[0].finish_reason == "length"


def test_case_U_each_of_several_end_ids_ends_a_row():
    for end in (0, 3):
        bench = Bench()
        rows = [request(0, [index], 200, stop_ids=frozenset({0, 3})) for index in range(40)]
        outputs = [completions(bench.serve([row]))[0] for row in rows]
        assert all(output.tokens[-1] in (0, 3) for output in outputs)
        assert any(output.tokens[-1] == end for output in outputs)
        assert {output.finish_reason for output in outputs} == {"stop"}


def test_a_prompt_without_tokens_is_an_error_row():
    error = completions(Bench().serve([request(0, [])]))[0].error
    assert error is not None
    assert error.kind == "empty_prompt"


def test_no_requests_no_steps():
    assert Bench().serve([]) == []


def test_the_engine_yields_idle_steps_while_nothing_is_ready():
    bench = Bench()
    steps = bench.serve([request(0, [1], 1)], [0, 0, 1])
    assert [step.idle for step in steps] == [True, True, False]


def test_the_waiting_window_is_bounded():
    bench = Bench(batch=1, lookahead=3)
    steps = bench.serve([request(index, [index], 3) for index in range(20)])
    assert max(step.waiting for step in steps) <= 3


def test_partials_hold_every_unfinished_row_with_output():
    bench = Bench(batch=2, blocks=6, block_size=4, prefix_cache=False)
    rows = [request(index, [index] * 8, 12, stop_ids=frozenset()) for index in range(2)]
    resumed = request(2, [9], 40, output=[1, 2], stop_ids=frozenset())
    seen: dict[int, int] = {}
    finished: set[int] = set()
    for step in bench.engine.run(FakeRequests([*rows, resumed])):
        finished |= {completion.id.index for completion in step.completions}
        partials = {partial.id.index: partial for partial in bench.engine.partials()}
        assert not finished & partials.keys()
        for index, count in seen.items():
            assert index in finished or len(partials[index].tokens) >= count
        seen = {index: len(partial.tokens) for index, partial in partials.items()}
    assert finished == {0, 1, 2}
    assert bench.engine.partials() == []


def test_a_partial_is_a_copy_of_the_tokens_so_far():
    bench = Bench()
    row = request(0, [1, 2], 9, stop_ids=frozenset())
    run = bench.engine.run(FakeRequests([row]))
    next(run), next(run)
    assert bench.engine.partials() == [Partial(row.id, bench.runner.alone(row)[:2], 1)]


def test_timings_cover_queue_prefill_decode_and_the_longest_gap():
    bench = Bench(budget=4, chunk=4)
    done = completions(bench.serve([request(0, [1] * 8, 3, stop_ids=frozenset())]))[0]
    # four looks at the clock a step; the first token comes at the end of the second step
    assert (done.queue_s, done.prefill_s, done.decode_s, done.longest_gap_s) == (0, 6, 8, 4)


def test_batches_never_exceed_the_slots():
    bench = Bench(batch=3)
    steps = bench.serve([request(index, [index] * 5, 6) for index in range(12)])
    assert max(step.running for step in steps) == 3
    assert max(step.batch_size for step in steps) == 3


def test_partials_of_one_row_are_told_apart_by_their_sample():
    bench = Bench()
    rows = [
        Request(RowId("s", 0), [1, 2], Sampling(9, logprobs=2), sample=sample, samples=2)
        for sample in range(2)
    ]
    run = bench.engine.run(FakeRequests(rows))
    next(run), next(run)
    tokens = bench.runner.alone(rows[0])[:2]
    logprobs = tuple(bench.runner.alone_logprobs(rows[0])[:2])
    assert bench.engine.partials() == [
        Partial(RowId("s", 0), tokens, 1, sample=sample, logprobs=logprobs) for sample in range(2)
    ]


def test_resumed_log_probabilities_past_the_end_are_cut_with_their_tokens():
    bench = Bench()
    whole = request(0, [1], 9, stop_ids=frozenset(), logprobs=0)
    resumed = replace(
        request(0, [1], 3, stop_ids=frozenset(), logprobs=0),
        output=bench.runner.alone(whole)[:5],
        logprobs=bench.runner.alone_logprobs(whole)[:5],
    )
    done = completions(bench.serve([resumed]))[0]
    assert list(done.tokens) == bench.runner.alone(whole)[:3]
    assert list(done.logprobs) == bench.runner.alone_logprobs(whole)[:3]


def test_resumed_tokens_without_their_log_probabilities_are_refused():
    bench = Bench()
    with pytest.raises(ValueError, match="2 tokens and 0 log-probabilities"):
        bench.serve([request(0, [1], 9, output=[4, 5], logprobs=0)])


@pytest.mark.parametrize(("length", "chunks"), [(15, 1), (16, 1), (17, 2), (48, 3)])
def test_a_completion_counts_the_pieces_of_its_prompt(length: int, chunks: int):
    bench = Bench(budget=16, chunk=16)
    done = completions(bench.serve([request(0, range(1, length + 1), 3)]))
    assert done[0].chunks == chunks


def test_pieces_that_a_preemption_makes_count_again():
    bench = Bench(blocks=6, block_size=4, batch=2, prefix_cache=False)
    requests = [request(index, [index] * 8, 12, stop_ids=frozenset()) for index in range(2)]
    done = completions(bench.serve(requests))
    assert (done[0].chunks, done[1].chunks) == (1, 2)


def test_a_row_that_repeats_itself_ends_and_keeps_its_tokens():
    bench = Bench()
    bench.runner = FakeRunner(4, vocabulary=[7])
    done = completions(bench.serve([request(0, [1], 50, stop_on_repetition=6)]))[0]
    assert (done.tokens, done.finish_reason) == ([7] * 6, "repetition")


def test_tokens_are_counted_only_for_rows_with_penalties():
    bench = Bench()
    rows = [
        request(0, [5, 6], 4, stop_ids=frozenset()),
        request(1, [5, 6], 4, stop_ids=frozenset(), repetition_penalty=1.5),
        request(2, [5, 6], 4, stop_ids=frozenset(), presence_penalty=0.5, output=[9]),
    ]
    for _ in bench.engine.run(FakeRequests(rows)):
        for sequence in bench.scheduler.unfinished():
            output, held = sequence.output, sequence.occurrences
            index = sequence.request.id.index
            assert (held is None) == (index == 0)
            if held is not None:
                expected = {5, 6, *output} if index == 1 else {*output}
                counted = dict(zip(held.tokens, held.counts, strict=True))
                assert counted == {token: output.count(token) for token in expected}
