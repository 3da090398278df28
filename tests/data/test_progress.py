"""What is done is read from files alone."""

import json
import math

import pyarrow.parquet as pq
import pytest

from jobrunner.data.fingerprint import read_fingerprint, remember
from jobrunner.data.intervals import Intervals
from jobrunner.data.progress import (
    Progress,
    clean_up,
    discard_partials,
    load_partials,
    save_partials,
)
from jobrunner.data.results.merge import merge_shard
from jobrunner.data.results.outcomes import outcome_table
from jobrunner.data.results.parts import list_parts, write_part
from jobrunner.errors import MismatchError
from jobrunner.records import Partial, RowId, SampleId, Span, TokenLogprob
from tests.data.conftest import answer, failure, kept_columns

SHARD = "a.parquet"
SPAN = Span(SHARD, 0, 10)


def part(run, indices, replaces=()):
    write_part(run, SHARD, [outcome_table([answer(SHARD, i) for i in indices])], replaces)


def test_progress_of_a_new_run_is_empty(run):
    progress = Progress(run, {SHARD: 10, "empty.parquet": 0})
    assert (progress.rows, progress.rows_done, progress.complete) == (10, 0, False)
    assert progress["empty.parquet"].all_done


def test_progress_counts_rows_of_parts_and_of_result_files(run):
    part(run, [0, 1, 7])
    write_part(run, "b.parquet", [outcome_table([failure("b.parquet", 0)])])
    merge_shard(run, "b.parquet", 1, *kept_columns(1))
    progress = Progress(run, {SHARD: 10, "b.parquet": 1})
    assert progress[SHARD].done == Intervals([(0, 2), (7, 8)])
    assert progress.rows_done == 4
    assert progress.unmerged == [SHARD]
    assert progress.tally.error_rows == 1
    assert progress.is_done(Span("b.parquet", 0, 1))
    assert not progress.is_done(SPAN)


def test_parts_replaced_by_a_merged_part_count_once_and_are_cleaned_up(run):
    part(run, [0, 1])
    [old] = list_parts(run, SHARD)
    part(run, [0, 1], replaces=(old.name,))
    assert Progress(run, {SHARD: 10}).tally.rows == 2
    clean_up(run, [SHARD], abandoned=lambda paths: [])
    assert old not in list_parts(run, SHARD)
    assert Progress(run, {SHARD: 10}).rows_done == 2


def test_only_temporary_files_of_dead_workers_are_cleaned_up(run):
    for worker in ("host-1-aa", "host-9-cc"):
        (run.temporary / f"{worker}.0123").touch()
    clean_up(run, [], abandoned=lambda paths: [path for path in paths if "host-9-cc" in path.name])
    assert [path.name for path in run.temporary.iterdir()] == ["host-1-aa.0123"]


def test_partials_are_found_by_the_next_worker_and_the_longer_text_wins(run, other_run):
    row, other = RowId(SHARD, 3), RowId(SHARD, 4)
    save_partials(run, SPAN, [Partial(row, [1, 2, 3], 1), Partial(other, [7], 2)])
    save_partials(other_run, SPAN, [Partial(row, [1, 2], 2)])
    found = load_partials(other_run, SPAN)
    assert found == {
        SampleId(row): Partial(row, [1, 2, 3], 1),
        SampleId(other): Partial(other, [7], 2),
    }
    discard_partials(other_run, SPAN, keep_mine=True)
    assert load_partials(run, SPAN) == {SampleId(row): Partial(row, [1, 2], 2)}
    discard_partials(run, SPAN)
    assert load_partials(run, SPAN) == {}


def test_partials_keep_samples_apart_and_log_probabilities_as_they_are(run):
    row = RowId(SHARD, 3)
    logprobs = (TokenLogprob(1, -0.5, ((1, -0.5), (2, -math.inf))), TokenLogprob(2, -1.5))
    saved = [Partial(row, [1, 2], 1, sample=1, logprobs=logprobs), Partial(row, [7], 2, sample=0)]
    save_partials(run, SPAN, saved)
    found = load_partials(run, SPAN)
    assert found == {SampleId(row, 1): saved[0], SampleId(row, 0): saved[1]}


def test_partials_belong_to_their_span(run):
    save_partials(run, SPAN, [Partial(RowId(SHARD, 3), [1], 1)])
    assert load_partials(run, Span(SHARD, 10, 20)) == {}


def test_case_C_a_changed_job_is_refused_with_both_values_and_nothing_is_written(run):
    remember(run, {"generation.temperature": 0.0, "input shard `a`": {"rows": 10}, "gone": 1})
    before = run.job_file.read_text()
    with pytest.raises(MismatchError) as raised:
        remember(run, {"generation.temperature": 0.7, "input shard `a`": {"rows": 11}, "new": 2})
    assert str(raised.value).splitlines()[1:] == [
        "  generation.temperature: 0.0 then, 0.7 now",
        "  gone: 1 then, absent now",
        "  input shard `a`: rows 10 then, rows 11 now",
        "  new: absent then, 2 now",
    ]
    assert run.job_file.read_text() == before


def test_an_equal_job_goes_on(run):
    remember(run, {"a": (1, 2)})
    remember(run, {"a": [1, 2]})
    assert read_fingerprint(run) == json.loads('{"a": [1, 2]}')


@pytest.mark.parametrize("other", [True, 1.0])
def test_case_C_values_that_only_python_takes_for_equal_are_told_apart(run, other):
    remember(run, {"a": {"b": 1}})
    with pytest.raises(MismatchError, match="differs in"):
        remember(run, {"a": {"b": other}})


def test_tokens_can_be_read_while_their_worker_saves_them_anew(run, monkeypatch):
    row = RowId(SHARD, 3)
    save_partials(run, SPAN, [Partial(row, [1] * 1000, 1)])
    opened, replaced = pq.ParquetFile.__init__, []

    def replaced_after_opening(self, *arguments, **options):
        opened(self, *arguments, **options)
        replaced.append(save_partials(run, SPAN, [Partial(row, [2] * 3, 1)]))

    monkeypatch.setattr(pq.ParquetFile, "__init__", replaced_after_opening)
    assert load_partials(run, SPAN)[SampleId(row)].tokens == [1] * 1000
    assert replaced
    monkeypatch.undo()
    assert load_partials(run, SPAN)[SampleId(row)].tokens == [2] * 3
