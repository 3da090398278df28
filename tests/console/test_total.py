"""The numbers of several workers together."""

import pytest

from jobrunner.console.snapshot import BandLatency, metrics_line
from jobrunner.console.total import Total


@pytest.fixture
def numbers(stats):
    """What a worker says after 200 seconds: 1,250 of 2,000 rows, 250 of them its own."""
    return metrics_line(stats.snapshot(200.0))


def test_the_total_of_one_worker_is_what_it_says(numbers):
    total = Total()
    total.hear(0, numbers, 200.0)
    whole = metrics_line(total.snapshot(200.0))
    assert whole.keys() == numbers.keys()
    for name, value in numbers.items():
        # the mean of one is its own but for rounding
        same = pytest.approx(value) if isinstance(value, float) else value
        assert whole[name] == same, name


def test_two_workers_add_up_their_work_and_their_speeds(numbers):
    total = Total()
    total.hear(0, numbers, 200.0)
    total.hear(1, numbers, 200.0)
    whole = total.snapshot(200.0)
    assert whole.rows_this_run == 2 * numbers["rows_this_run"]
    # both found the same 1,000 rows done
    assert whole.rows_done == 1000 + whole.rows_this_run
    assert whole.errors == 2 + 2
    assert whole.output_tokens_per_s == pytest.approx(2 * numbers["output_tokens_per_s"])
    assert whole.running == 2 * numbers["running"]
    assert whole.eta_s == pytest.approx(numbers["eta_s"] / 2)
    assert whole.decode_mean_s == pytest.approx(numbers["decode_mean_s"])
    assert len(whole.error_examples["null_prompt"]) == 2


def test_of_the_latencies_by_priority_the_worst_are_shown(numbers):
    total = Total()
    for worker, p95_s in enumerate((3.0, 5.0)):
        band = {"priority": 1, "samples": 4, "p50_s": 2.0, "p95_s": p95_s, "p99_s": None}
        total.hear(worker, numbers | {"latency_by_priority": [band]}, 200.0)
    assert total.snapshot(200.0).latency_by_priority == (BandLatency(1, 8, 2.0, 5.0, None),)


def test_the_work_of_a_worker_that_died_still_counts_and_its_speed_does_not(numbers):
    total = Total()
    total.hear(0, numbers, 200.0)
    total.left(0)
    total.hear(0, numbers | {"running": 1, "rows_done": 1500}, 200.0)
    whole = total.snapshot(200.0)
    assert whole.rows_this_run == 2 * numbers["rows_this_run"]
    assert whole.running == 1
    total.ended()
    assert total.snapshot(200.0).running == 0


def test_a_row_that_two_workers_did_counts_no_more_than_there_are(numbers):
    total = Total()
    for worker in range(5):
        total.hear(worker, numbers | {"rows_this_run": 900, "rows_done": 1900}, 200.0)
    assert total.snapshot(200.0).percent == 100.0


def test_nothing_is_known_before_somebody_has_spoken():
    assert not Total().known


def test_the_total_has_the_limits_of_the_worker_with_least_memory(numbers):
    total = Total()
    for worker, (times, tokens, rows) in enumerate([(0, 512, 64), (2, 128, 64)]):
        limits = {"out_of_memory": times, "token_budget": tokens, "max_batch_size": rows}
        total.hear(worker, {**numbers, **limits}, 200.0)
    whole = total.snapshot(200.0)
    assert (whole.out_of_memory, whole.token_budget, whole.max_batch_size) == (2, 128, 64)
