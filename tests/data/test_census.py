"""What a census counts equals what slow, obvious code counts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.census import (
    EXACT_LENGTH,
    Census,
    Repeats,
    Sharing,
    doubling_histogram,
    histogram,
    percentile,
    rounded,
)
from jobrunner.records import Completion, Request, RowError, RowId, Sampling

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=30)


def census(prompts, max_new_tokens=4, max_model_len=20, **options) -> Census:
    counted = Census(
        max_new_tokens=max_new_tokens, max_model_len=max_model_len, block_size=4, **options
    )
    for index, prompt in enumerate(prompts):
        room = min(max_new_tokens, max_model_len - len(prompt))
        counted.add([Request(RowId("a", index), prompt, Sampling(room))])
    return counted


def failed(index: int, kind="empty_prompt") -> Completion:
    return Completion(RowId("a", index), error=RowError(kind, f"row {index}"))


@given(PROMPTS)
def test_lengths_and_repeats_are_counted(prompts):
    report = census(prompts).report()
    assert report.rows == report.ok_rows == len(prompts)
    assert report.prompt_lengths == dict(sorted(Counter(map(len, prompts)).items()))
    assert report.prompt_tokens == sum(map(len, prompts))
    assert report.repeated_rows == len(prompts) - len({tuple(prompt) for prompt in prompts})
    assert report.repeats_sampled == 1
    longest = sorted((len(prompt) for prompt in prompts), reverse=True)[:5]
    assert [row.prompt_tokens for row in report.longest] == longest


@given(PROMPTS)
def test_shared_tokens_are_full_blocks_of_an_earlier_beginning(prompts):
    sharing = Sharing(block_size=4)
    expected = 0
    for index, prompt in enumerate(prompts):
        sharing.add(prompt)
        # the last token is always computed
        lengths = range(4, len(prompt), 4)
        known = [
            n for n in lengths if any(p[:n] == prompt[:n] and len(p) > n for p in prompts[:index])
        ]
        expected += max(known, default=0)
    assert sharing.shared_tokens == expected


def test_the_imagined_cache_forgets_what_was_used_least_recently():
    sharing = Sharing(block_size=1, capacity_blocks=2)
    for prompt in ([1, 0], [2, 0], [1, 0], [3, 0], [1, 0], [2, 0]):
        sharing.add(prompt)
    assert sharing.shared_tokens == 2


def test_errors_are_counted_by_kind_with_three_examples_each():
    counted = census([])
    counted.add([failed(index) for index in range(5)])
    counted.add([failed(9, "bad_type")])
    report = counted.report()
    assert (report.rows, report.ok_rows) == (6, 0)
    assert report.errors == {"bad_type": 1, "empty_prompt": 5}
    assert report.examples["empty_prompt"] == ("row 0", "row 1", "row 2")
    assert report.percentile(0.5) is None


def test_samples_of_a_row_count_once_and_need_memory_for_each():
    counted = census([])
    sampling = Sampling(4)
    counted.add([Request(RowId("a", 0), [1, 2], sampling, sample=s, samples=3) for s in range(3)])
    report = counted.report()
    assert (report.rows, report.need_tokens, report.need_max) == (1, 14, 14)


def test_rows_whose_output_is_cut_by_the_context_are_counted():
    report = census([[1] * 15, [1] * 16, [1] * 17, [1] * 19]).report()
    assert report.cut_rows == 2
    assert report.need_max == 20


def test_case_L_a_prompt_beyond_the_kv_memory_cannot_fit():
    report = census([[1] * 7, [1] * 10, [1] * 11], kv_tokens=10).report()
    assert report.errors == {"cannot_fit": 1}
    assert report.examples["cannot_fit"] == (
        "row 2 of `a` needs KV memory for 11 tokens, capacity 10 tokens",
    )
    assert report.outgrowing_rows == 1


def test_truncated_rows_are_counted():
    counted = census([])
    counted.add([Request(RowId("a", 0), [1], Sampling(4), truncated_tokens=7)])
    report = counted.report()
    assert (report.truncated_rows, report.truncated_tokens) == (1, 7)


def test_repeats_beyond_the_limit_are_estimated_in_bounded_memory():
    repeats = Repeats(limit=1000)
    for prompt in range(40_000):
        # half of them come twice
        repeats.add(hash((prompt % 20_000,)))
    found, sampled = repeats.estimate()
    assert sampled > 1
    assert len(repeats._hashes) <= 1000
    assert found == pytest.approx(20_000, rel=0.2)


def test_one_prompt_many_times_is_exact_beyond_the_limit():
    repeats = Repeats(limit=10)
    for _ in range(1000):
        repeats.add(7)
    assert repeats.estimate() == (999, 1)


@given(st.integers(1, 2**40))
def test_lengths_are_exact_when_small_and_close_when_great(length):
    assert rounded(length) == length or length >= EXACT_LENGTH
    assert length * (1 - 2 / EXACT_LENGTH) <= rounded(length) <= length


@given(st.lists(st.integers(0, 5000), min_size=1), st.integers(1, 20))
def test_a_histogram_counts_everything_in_few_bins(values, bins):
    found = histogram(Counter(values), bins)
    assert len(found) <= bins
    assert sum(count for _, _, count in found) == len(values)
    for first, last, count in found:
        assert count == sum(first <= value <= last for value in values)


@given(st.lists(st.integers(0, 5000), min_size=1))
def test_a_doubling_histogram_counts_everything(values):
    found = doubling_histogram(Counter(values))
    assert sum(count for _, _, count in found) == len(values)
    for first, last, count in found:
        assert count == sum(first <= value <= last for value in values)


def test_a_histogram_of_nothing_has_no_bins():
    assert histogram({}, 10) == doubling_histogram({}) == []


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, share):
    found = percentile(dict(sorted(Counter(values).items())), share)
    reached = [v for v in sorted(set(values)) if sum(x <= v for x in values) >= share * len(values)]
    assert found == reached[0]
