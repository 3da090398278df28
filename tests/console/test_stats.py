"""The numbers against slow, obvious references."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.console.machine import MachineLimits
from jobrunner.console.snapshot import Snapshot, Totals, metrics_line
from jobrunner.console.stats import MOST_BANDS, RECENT_S, Stats, peak_memory_bytes
from jobrunner.records import Completion, Request, RowError, RowId, Sampling, Step


def fresh(rows: int = 100, slots: int | None = 8, **before: int) -> Stats:
    return Stats(Totals(rows, **before), slots=slots, started_s=0.0)


def finished(tokens: int, prompt_tokens: int = 0, reason: str = "stop") -> Completion:
    return Completion(
        RowId("a", 0),
        tokens=[1] * tokens,
        finish_reason=reason,  # type: ignore[arg-type]
        prompt_tokens=prompt_tokens,
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    batch_size = draw(st.integers(0, 40))
    if batch_size == 0:
        return Step(waiting=draw(st.integers(0, 9)), step_s=draw(st.floats(0, 9)))
    prefill, decode, padded = (draw(st.integers(0, 100)) for _ in range(3))
    return Step(
        completions=[finished(draw(st.integers(0, 9)), draw(st.integers(0, 9)))],
        prefill_tokens=prefill,
        decode_tokens=decode,
        output_tokens=draw(st.integers(0, batch_size)),
        tokens_computed=prefill + decode + padded,
        tokens_padded=padded,
        batch_size=batch_size,
        waiting=draw(st.integers(0, 9)),
        kv_blocks_used=draw(st.integers(0, 7)),
        kv_blocks=7,
        forward_s=draw(st.floats(0, 1)),
        step_s=draw(st.floats(1, 2)),
    )


@given(st.lists(steps(), min_size=1), st.one_of(st.none(), st.integers(40, 64)))
def test_numbers_of_steps_equal_their_definitions(observed: list[Step], slots: int | None) -> None:
    stats = fresh(slots=slots)
    for second, step in enumerate(observed, 1):
        stats.observe(step, float(second))
    now_s = len(observed) + 0.5
    found = stats.snapshot(now_s)

    busy = [step for step in observed if step.batch_size]
    assert found.steps == len(busy)
    outputs = sum(step.output_tokens for step in observed)
    prompts = sum(row.prompt_tokens for step in observed for row in step.completions)
    assert found.output_tokens_per_s == pytest.approx(outputs / now_s)
    assert found.total_tokens_per_s == pytest.approx((outputs + prompts) / now_s)
    assert found.rows_per_s == pytest.approx(len(busy) / now_s)
    if not busy:
        assert found.utilization is None
        assert found.batch_size_mean is None
        return
    sizes = [step.batch_size for step in busy]
    assert found.utilization == pytest.approx(sum(sizes) / ((slots or max(sizes)) * len(busy)))
    assert found.batch_size_mean == pytest.approx(sum(sizes) / len(sizes))
    assert found.batch_size_max == max(sizes)
    assert found.both_kinds_share == pytest.approx(
        sum(1 for step in busy if step.prefill_tokens and step.decode_tokens) / len(busy)
    )
    computed = sum(step.tokens_computed for step in busy)
    real = sum(step.prefill_tokens + step.decode_tokens for step in busy)
    assert found.padding_efficiency == (pytest.approx(real / computed) if computed else None)
    assert found.busy_s == pytest.approx(sum(step.step_s for step in busy))
    forward_s = sum(step.forward_s for step in busy)
    assert found.fused_fraction == pytest.approx(forward_s / found.busy_s)
    if found.prefill_time_s is not None and found.decode_time_s is not None:
        assert found.prefill_time_s + found.decode_time_s == pytest.approx(forward_s)
    assert found.waiting_mean == pytest.approx(sum(step.waiting for step in busy) / len(busy))
    assert found.kv_use_peak == pytest.approx(max(step.kv_blocks_used for step in busy) / 7)
    for power, count in enumerate(found.batch_size_histogram):
        assert count == sum(1 for size in sizes if 2**power <= size < 2 ** (power + 1))
    assert sum(found.batch_size_histogram) == len(busy)


def test_answers_of_equal_rows_are_counted_and_generate_no_tokens() -> None:
    stats = fresh()
    stats.observe(Step(batch_size=1, output_tokens=1, duplicates=2), 1.0)
    stats.observe(Step(duplicates=3), 2.0)
    found = stats.snapshot(3.0)
    assert (found.duplicates, found.output_tokens) == (5, 1)


def test_idle_step_counts_no_step_but_shows_in_what_is_now() -> None:
    stats = fresh()
    stats.observe(Step(batch_size=4, running=4, tokens_computed=4, step_s=1.0), 1.0)
    stats.observe(Step(waiting=0, step_s=5.0), 6.0)
    found = stats.snapshot(6.0)
    assert (found.steps, found.batch_size, found.running) == (1, 0, 0)
    assert found.utilization == 0.5


def test_row_completed_by_an_idle_step_is_counted() -> None:
    stats = fresh()
    refused = Completion(RowId("a", 1), error=RowError("cannot_fit", "too big"))
    stats.observe(Step(completions=[refused]), 1.0)
    assert stats.snapshot(1.0).errors_by_kind == {"cannot_fit": 1}


def test_row_failed_in_preparation_counts_as_done_and_as_error() -> None:
    stats = fresh(rows=4, rows_done_before=2, errors_before=1)
    stats.row_failed(RowError("null_prompt", "null"), RowId("a", 0))
    found = stats.snapshot(1.0)
    assert (found.rows_done, found.errors, found.percent) == (3, 2, 75.0)
    assert found.errors_by_kind == {"null_prompt": 1}


def test_case_G_resumed_run_counts_only_its_own_rows_and_tokens() -> None:
    stats = fresh(rows=100, rows_done_before=50, errors_before=3)
    assert stats.snapshot(0.0).percent == 50.0
    # 10 rows in 10 s, of 90 + 10 tokens each; 5 of the 10 are from an earlier run's partials
    for second in range(1, 11):
        row = finished(tokens=10, prompt_tokens=90)
        stats.observe(Step(completions=[row], output_tokens=5, batch_size=1), float(second))
    found = stats.snapshot(10.0)
    assert found.percent == 60.0
    assert found.rows_per_s == 1.0
    assert found.output_tokens_per_s == 5.0
    assert found.total_tokens_per_s == 95.0
    assert found.eta_s == pytest.approx(40 * 100 / 95)


@given(
    st.integers(0, 20).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, rows))),
    st.lists(st.booleans(), max_size=40),
)
def test_case_G_percent_never_goes_back_or_past_100(
    known: tuple[int, int], rows_fail: list[bool]
) -> None:
    stats = fresh(rows=known[0], rows_done_before=known[1])
    percents = [stats.snapshot(0.0).percent]
    for second, fails in enumerate(rows_fail, 1):
        if fails:
            stats.row_failed(RowError("bad_text", ""), RowId("a", 0))
        else:
            stats.observe(Step(completions=[finished(1)], batch_size=1), float(second))
        percents.append(stats.snapshot(float(second)).percent)
    assert percents == sorted(percents)
    assert percents[-1] <= 100.0


def test_eta_is_unknown_until_a_row_with_tokens_is_finished() -> None:
    stats = fresh()
    assert stats.snapshot(1.0).eta_s is None
    stats.observe(Step(output_tokens=4, batch_size=4), 1.0)
    stats.row_failed(RowError("null_prompt", ""), RowId("a", 0))
    assert stats.snapshot(2.0).eta_s is None


def test_eta_is_zero_when_no_row_is_left() -> None:
    assert fresh(rows=0).snapshot(1.0).eta_s == 0.0
    assert fresh(rows=3, rows_done_before=3).snapshot(0.0).eta_s == 0.0


def test_empty_input_is_complete() -> None:
    assert fresh(rows=0).snapshot(0.0).percent == 100.0


def test_rates_are_zero_before_any_time_has_passed() -> None:
    stats = fresh()
    stats.observe(Step(output_tokens=4, batch_size=4), 0.0)
    assert stats.snapshot(0.0).output_tokens_per_s == 0.0


# quarters of a second: their sums are exact
@given(
    st.lists(
        st.tuples(st.integers(4, 36).map(lambda quarters: quarters / 4), st.integers(0, 50)),
        min_size=1,
        max_size=60,
    )
)
def test_recent_rate_covers_the_last_seconds_only(moves: list[tuple[float, int]]) -> None:
    stats = fresh()
    now_s, history = 0.0, [(0.0, 0)]
    for seconds, tokens in moves:
        now_s += seconds
        stats.observe(Step(output_tokens=tokens, batch_size=1), now_s)
        history.append((now_s, history[-1][1] + tokens))
    old_enough = [entry for entry in history if entry[0] <= now_s - RECENT_S] or history[:1]
    since_s, tokens_then = old_enough[-1]
    expected = (history[-1][1] - tokens_then) / (now_s - since_s)
    assert stats.snapshot(now_s).recent_output_tokens_per_s == pytest.approx(expected)


def test_recent_rate_falls_to_zero_when_nothing_comes_any_more() -> None:
    stats = fresh()
    stats.observe(Step(output_tokens=100, batch_size=1), 1.0)
    assert stats.snapshot(2.0).recent_output_tokens_per_s == 50.0
    assert stats.snapshot(60.0).recent_output_tokens_per_s == 0.0


def test_samples_do_not_grow_with_steps() -> None:
    stats = fresh()
    for step in range(20_000):
        stats.observe(Step(output_tokens=1, batch_size=1), step * 0.01)
    assert len(stats._samples) <= RECENT_S + 2


def test_latency_is_split_and_error_rows_do_not_enter_it() -> None:
    stats = fresh()
    row = Completion(
        RowId("a", 1),
        [1],
        "length",
        queue_s=1.0,
        prefill_s=2.0,
        decode_s=3.0,
        longest_gap_s=0.5,
    )
    refused = Completion(RowId("a", 2), error=RowError("cannot_fit", ""))
    stats.observe(Step(completions=[row, refused], batch_size=1), 1.0)
    found = stats.snapshot(1.0)
    assert (found.queue_mean_s, found.queue_p50_s, found.queue_p99_s) == (1.0, 1.0, 1.0)
    assert (found.prefill_p50_s, found.decode_p95_s, found.latency_p50_s) == (2.0, 3.0, 6.0)
    assert found.longest_gap_s == 0.5


def ended_after(latency_s: float, priority: int) -> Completion:
    row = RowId("a", 0)
    request = Request(row, [1], Sampling(1), priority=priority)
    return Completion(
        row, [1], "length", queue_s=latency_s - 1.0, prefill_s=0.75, decode_s=0.25, request=request
    )


def test_latencies_are_told_by_priority_where_there_are_several() -> None:
    stats = fresh()
    # of 1, 2 .. 100 s the 50th, 95th and 99th; the bands come mixed, the lower one first
    rows = [row for s in range(1, 101) for row in (ended_after(s + 500.0, 3), ended_after(s, 0))]
    stats.observe(Step(completions=rows, batch_size=4), 1.0)
    high, low = stats.snapshot(1.0).latency_by_priority
    assert (high.priority, high.samples, low.priority, low.samples) == (0, 100, 3, 100)
    for band, offset_s in ((high, 0.0), (low, 500.0)):
        for found, exact in ((band.p50_s, 50.0), (band.p95_s, 95.0), (band.p99_s, 99.0)):
            assert found is not None
            assert exact + offset_s <= found <= 1.05 * (exact + offset_s)


def test_latencies_of_one_band_are_not_told_twice() -> None:
    stats = fresh()
    stats.observe(Step(completions=[ended_after(2.0, 7)] * 3, batch_size=3), 1.0)
    assert stats.snapshot(1.0).latency_by_priority == ()
    refused = replace(ended_after(2.0, 1), error=RowError("cannot_fit", ""))
    stats.observe(Step(completions=[refused], batch_size=3), 1.0)
    assert stats.snapshot(1.0).latency_by_priority == ()


def test_bands_do_not_grow_with_priorities() -> None:
    stats = fresh(rows=1000)
    rows = [ended_after(2.0, priority) for priority in range(1000)]
    stats.observe(Step(completions=rows, batch_size=1), 1.0)
    bands = stats.snapshot(1.0).latency_by_priority
    assert [band.priority for band in bands] == list(range(MOST_BANDS))


def test_stop_share_is_of_rows_that_ended_without_an_error() -> None:
    stats = fresh()
    rows = [finished(1), finished(1), finished(1), finished(1, reason="length")]
    stats.observe(Step(completions=rows, batch_size=4), 1.0)
    stats.row_failed(RowError("bad_text", ""), RowId("a", 0))
    found = stats.snapshot(1.0)
    assert (found.stop_rows, found.length_rows, found.stop_share) == (3, 1, 0.75)


def test_row_that_repeated_itself_did_not_end_by_stop() -> None:
    stats = fresh()
    rows = [finished(1), finished(1, reason="length"), finished(1, reason="repetition")]
    stats.observe(Step(completions=[*rows, finished(1)], batch_size=4), 1.0)
    found = stats.snapshot(1.0)
    assert (found.stop_rows, found.length_rows, found.repetition_rows) == (2, 1, 1)
    assert found.stop_share == 0.5


def test_row_of_several_samples_is_finished_with_the_last_of_them() -> None:
    stats = fresh()
    first, last = (
        Completion(
            RowId("a", 0),
            [1] * 5,
            "stop",
            prompt_tokens=90,
            request=Request(RowId("a", 0), [1] * 90, Sampling(5), sample=sample, samples=2),
        )
        for sample in (1, 0)
    )
    stats.observe(Step(completions=[first], output_tokens=5, batch_size=2), 1.0)
    found = stats.snapshot(1.0)
    assert (found.rows_this_run, found.prompt_tokens, found.output_tokens) == (0, 0, 5)
    stats.observe(Step(completions=[last], output_tokens=5, batch_size=1), 2.0)
    found = stats.snapshot(2.0)
    assert (found.rows_this_run, found.prompt_tokens, found.output_tokens) == (1, 90, 10)
    assert found.stop_rows == 2
    # 99 rows of 90 + 2 · 5 tokens at 50 tokens/s
    assert found.eta_s == pytest.approx(99 * 100 / 50)


def test_passes_are_split_by_the_cost_of_their_tokens() -> None:
    stats = fresh()
    # each pass costs 0.01 + 0.001 s a prefill token + 0.01 s a decode token, each step 0.02 more
    for prefill, decode in [(100, 0), (0, 4), (0, 9), (60, 6)]:
        forward_s = 0.01 + 0.001 * prefill + 0.01 * decode
        stats.observe(
            Step(
                prefill_tokens=prefill,
                decode_tokens=decode,
                batch_size=decode + (prefill > 0),
                tokens_recomputed=10 if prefill == 60 else 0,
                forward_s=forward_s,
                step_s=forward_s + 0.02,
            ),
            1.0,
        )
    found = stats.snapshot(1.0)
    # the last pass, 0.13 s, goes half to 60 prefill tokens and half to 6 decode tokens
    assert found.prefill_time_s == pytest.approx(0.11 + 0.065)
    assert found.decode_time_s == pytest.approx(0.05 + 0.10 + 0.065)
    assert found.busy_s == pytest.approx(0.39 + 4 * 0.02)
    assert found.fused_fraction == pytest.approx(0.39 / 0.47)
    # of one second
    assert found.device_utilization == pytest.approx(0.39)
    assert found.recompute_s == pytest.approx(10 * 0.001)
    assert found.swap_overhead_s == found.recompute_s


def test_recomputing_takes_no_time_where_nothing_is_recomputed() -> None:
    stats = fresh()
    assert stats.snapshot(0.0).recompute_s == 0.0
    stats.observe(Step(tokens_recomputed=5, prefill_tokens=5, batch_size=1, forward_s=1.0), 1.0)
    # how much of the pass that was is not known yet
    assert stats.snapshot(1.0).recompute_s is None


def test_swaps_add_to_the_time_lost_to_preemptions() -> None:
    stats = fresh()
    stats.observe(Step(batch_size=1, swapped_blocks=3, swap_s=0.25, forward_s=1.0), 1.0)
    stats.observe(Step(batch_size=1, swapped_blocks=2, swap_s=0.25, forward_s=1.0), 2.0)
    found = stats.snapshot(2.0)
    assert (found.swapped_blocks, found.swap_s, found.swap_overhead_s) == (5, 0.5, 0.5)


def test_speed_up_is_that_of_the_steps_that_only_decode() -> None:
    stats = fresh()
    # t_B = 0.6 + 0.2 B: f = 0.75, at most 4 times as fast as one by one
    for batch_size in (1, 5):
        took = 0.6 + 0.2 * batch_size
        stats.observe(Step(decode_tokens=batch_size, batch_size=batch_size, step_s=took), 1.0)
    found = stats.snapshot(1.0)
    assert found.parallel_fraction == pytest.approx(0.75)
    assert found.speed_up_ceiling == pytest.approx(4.0)
    # 6 tokens at 0.8 s, in 0.8 + 1.6 s
    assert found.speed_up == pytest.approx(4.8 / 2.4)


def test_wait_is_estimated_from_queue_batch_and_time_in_the_engine() -> None:
    stats = fresh()
    row = Completion(RowId("a", 1), [1], "stop", queue_s=7.0, prefill_s=2.0, decode_s=10.0)
    stats.observe(Step(batch_size=4, waiting=8, forward_s=0.9, step_s=1.0), 1.0)
    stats.observe(Step(completions=[row], batch_size=8, waiting=10, forward_s=0.6, step_s=1.0), 2.0)
    found = stats.snapshot(2.0)
    assert found.waiting_mean == 9.0
    # 9 wait where 6 run for 12 s each
    assert found.queue_wait_estimate_s == pytest.approx(9.0 * 12.0 / 6.0)
    assert (found.prefill_mean_s, found.decode_mean_s) == (2.0, 10.0)
    # three quarters of the steps are forward passes
    assert found.overhead_mean_s == pytest.approx(12.0 / 4)


def test_cost_is_the_price_of_the_busy_time() -> None:
    stats = Stats(Totals(9), slots=8, started_s=0.0, price_per_gpu_hour=3.0)
    assert stats.snapshot(0.0).cost == 0.0
    assert stats.snapshot(0.0).cost_per_row is None
    rows = [finished(100, prompt_tokens=300), finished(100, prompt_tokens=500)]
    stats.observe(Step(completions=rows, output_tokens=200, batch_size=2, step_s=1200.0), 1200.0)
    stats.observe(Step(step_s=5.0), 1205.0)
    found = stats.snapshot(1205.0)
    # 20 minutes at 3 an hour: 1 for 2 rows and 1,000 tokens; the idle step costs nothing
    assert (found.cost, found.cost_per_row, found.cost_per_million_tokens) == (1.0, 0.5, 1000.0)


def test_cost_is_unknown_without_a_price() -> None:
    stats = fresh()
    stats.observe(Step(completions=[finished(1)], batch_size=1, step_s=1.0), 1.0)
    found = stats.snapshot(1.0)
    assert (found.cost, found.cost_per_row, found.cost_per_million_tokens) == (None, None, None)


def test_distance_to_the_limit_is_the_least_time_over_the_time_taken() -> None:
    limits = MachineLimits(
        flops_per_token=1e9,
        weight_bytes=1e9,
        kv_bytes_per_token=1e4,
        gemm_flops_per_s=1e12,
        read_bytes_per_s=1e11,
    )
    stats = Stats(Totals(9), slots=8, started_s=0.0, limits=limits)
    # 100 tokens: 0.1 s of FLOPs, 0.01 s of reading
    stats.observe(Step(prefill_tokens=100, tokens_computed=100, batch_size=1, step_s=0.2), 1.0)
    # 4 tokens: 0.004 s of FLOPs; 1e9 bytes of weights and 1e8 of KV take 0.011 s
    decode = Step(tokens_computed=4, context_tokens=10_000, batch_size=4, step_s=0.022)
    stats.observe(decode, 2.0)
    found = stats.snapshot(2.0)
    assert found.least_time_s == pytest.approx(0.111)
    assert found.roofline_fraction == pytest.approx(0.5)


def test_distance_to_the_limit_is_unknown_where_nothing_was_measured() -> None:
    stats = fresh()
    stats.observe(Step(tokens_computed=4, batch_size=4, step_s=1.0), 1.0)
    found = stats.snapshot(1.0)
    assert (found.least_time_s, found.roofline_fraction) == (None, None)


def test_device_memory_is_asked_for_at_each_snapshot() -> None:
    held = iter([None, 5 << 30])
    stats = Stats(Totals(9), slots=8, started_s=0.0, device_memory=lambda: next(held))
    assert stats.snapshot(0.0).device_memory_bytes is None
    assert stats.snapshot(1.0).device_memory_bytes == 5 << 30


def test_nothing_runs_after_the_end() -> None:
    stats = fresh()
    stats.observe(Step(batch_size=4, running=4, waiting=2, kv_blocks_used=3, kv_blocks=9), 1.0)
    stats.ended()
    found = stats.snapshot(2.0)
    assert (found.batch_size, found.running, found.waiting, found.kv_use) == (0, 0, 0, 0.0)
    assert (found.batch_size_mean, found.kv_use_peak) == (4.0, pytest.approx(1 / 3))


def test_shards_of_earlier_runs_count_as_done() -> None:
    stats = fresh(shards=3, shards_done_before=1)
    stats.shard_started("b.parquet")
    stats.known(0, 2)
    found = stats.snapshot(1.0)
    assert (found.shards_done, found.shards_total, found.shard) == (2, 3, "b.parquet")


def test_snapshot_counts_nothing(stats: Stats) -> None:
    assert stats.snapshot(200.0) == stats.snapshot(200.0)


def test_metrics_line_has_the_names_of_the_snapshot_and_is_json(snapshot: Snapshot) -> None:
    line = json.loads(json.dumps(metrics_line(snapshot), allow_nan=False))
    assert list(line) == [field.name for field in fields(Snapshot)]
    assert line["error_examples"] == {
        "null_prompt": ["row 7 of `train/part-00002.parquet` is null"]
    }


def test_first_snapshot_is_json_too() -> None:
    json.dumps(metrics_line(fresh(rows=0).snapshot(0.0)), allow_nan=False)


def test_peak_memory_of_this_process_is_plausible() -> None:
    assert 5e6 < peak_memory_bytes() < 1e12


def test_the_limits_that_a_lack_of_memory_left_stay_known(stats: Stats) -> None:
    found = stats.snapshot(200.0)
    assert (found.out_of_memory, found.token_budget, found.max_batch_size) == (0, None, None)
    stats.observe(Step(out_of_memory=2, token_budget=250, max_batch_size=30), 201.0)
    stats.observe(Step(), 202.0)
    stats.ended()
    found = stats.snapshot(203.0)
    assert (found.out_of_memory, found.token_budget, found.max_batch_size) == (2, 250, 30)
