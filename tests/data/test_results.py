"""Parts are committed whole, and merge into one row each, in order."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import OUTCOME_SCHEMA, RunDirectory
from jobrunner.data.results import merge as module
from jobrunner.data.results.merge import compact, merge_shard, merge_windows, part_cursors
from jobrunner.data.results.outcomes import outcome_table
from jobrunner.data.results.parts import (
    Results,
    Tally,
    list_parts,
    read_part_footer,
    read_parts,
    write_part,
)
from jobrunner.data.results.result_files import read_result_tally
from jobrunner.errors import InfrastructureError
from tests.data.conftest import answer, failure, kept_columns, read_result
from tests.properties import examples

SHARD = "a/b.parquet"


def part(run, indices, text="", replaces=()):
    write_part(run, SHARD, [outcome_table([answer(SHARD, i, text) for i in indices])], replaces)


def test_commit_writes_one_sorted_part_a_shard_and_says_which_rows(run):
    results = Results(run, part_rows=3)
    for index in (5, 1, 2):
        results.add(answer(SHARD, index))
    results.add(failure("other.parquet", 0))
    assert results.full
    committed = results.commit()
    assert committed == {SHARD: Intervals([(1, 3), (5, 6)]), "other.parquet": Intervals([(0, 1)])}
    [path] = list_parts(run, SHARD)
    assert pq.read_table(path)["row"].to_pylist() == [1, 2, 5]
    footer = read_part_footer(path)
    assert footer.rows == Intervals([(1, 3), (5, 6)])
    assert footer.tally == Tally(3, {}, {"stop": 3}, prompt_tokens=9, output_tokens=6)
    assert not results.full
    assert results.commit() == {}


def test_a_failed_write_leaves_no_part_and_no_temporary_file(run, monkeypatch):
    monkeypatch.setattr(module.pq.ParquetWriter, "write_table", raise_disk_full)
    with pytest.raises(OSError, match="full"):
        part(run, [0])
    assert list_parts(run, SHARD) == []
    assert list(run.temporary.iterdir()) == []


def test_a_clock_that_stands_still_or_goes_back_never_replaces_a_part(run, monkeypatch):
    times = iter([7, 7, 5, -5])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    for index in range(4):
        part(run, [index])
    assert [len(footer.rows) for footer in read_parts(run, SHARD).values()] == [1] * 4


def raise_disk_full(*args, **kwargs):
    raise OSError(28, "disk full")


def test_merge_gives_every_row_once_in_order_with_its_kept_columns(run):
    part(run, [3, 4, 9])
    part(run, [0, 1, 2])
    write_part(run, SHARD, [outcome_table([failure(SHARD, i) for i in (5, 6, 7, 8)])])
    tally = merge_shard(run, SHARD, 10, *kept_columns(10))
    rows = read_result(run, SHARD)
    assert [row["row"] for row in rows] == list(range(10))
    assert [row["id"] for row in rows] == [f"id-{index}" for index in range(10)]
    assert [row["status"] for row in rows] == ["ok"] * 5 + ["error"] * 4 + ["ok"]
    assert rows[5]["error_kind"] == "null_prompt"
    assert tally == read_result_tally(run, SHARD)
    assert (tally.rows, tally.errors) == (10, {"null_prompt": 4})
    assert not run.parts(SHARD).exists()


def test_merge_of_a_shard_without_rows_makes_an_empty_file_of_the_same_schema(run):
    kept, schema = kept_columns(0)
    merge_shard(run, SHARD, 0, kept, schema)
    assert pq.read_schema(run.result(SHARD)).equals(pa.schema([*schema, *OUTCOME_SCHEMA]))
    assert read_result(run, SHARD) == []


def test_merge_refuses_a_shard_with_a_missing_row_and_keeps_its_parts(run):
    part(run, [0, 2])
    with pytest.raises(InfrastructureError, match="in no part"):
        merge_shard(run, SHARD, 3, *kept_columns(3))
    assert not run.result(SHARD).exists()
    assert len(list_parts(run, SHARD)) == 1


def test_merge_refuses_an_input_that_lost_rows(run):
    part(run, [0, 1, 2])
    kept, schema = kept_columns(2)
    with pytest.raises(InfrastructureError, match="ended 1 rows early"):
        merge_shard(run, SHARD, 3, kept, schema)


def test_a_row_in_two_parts_counts_once_and_the_first_committed_wins(run):
    part(run, [0, 1], text="first")
    part(run, [1, 2], text="second")
    merge_shard(run, SHARD, 3, *kept_columns(3))
    assert [row["text"] for row in read_result(run, SHARD)] == ["first", "first", "second"]


def test_merge_that_another_worker_finished_first_takes_its_result(run, other_run):
    part(run, [0, 1])

    def overtaken():
        merge_shard(other_run, SHARD, 2, *kept_columns(2))
        return kept_columns(2)[0]()

    assert merge_shard(run, SHARD, 2, overtaken, kept_columns(2)[1]).rows == 2
    assert len(read_result(run, SHARD)) == 2


def test_many_parts_are_merged_into_few_and_name_what_they_replace(run, monkeypatch):
    monkeypatch.setattr(module, "MOST_PARTS", 4)
    for index in range(23):
        part(run, [index])
        compact(run, SHARD)
        assert len(list_parts(run, SHARD)) <= 4
    assert any(footer.replaces for footer in read_parts(run, SHARD).values())
    merge_shard(run, SHARD, 23, *kept_columns(23))
    assert [row["text"] for row in read_result(run, SHARD)] == [f"answer {i}" for i in range(23)]


def test_a_damaged_part_is_named_with_what_to_do(run):
    part(run, [0])
    [path] = list_parts(run, SHARD)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InfrastructureError, match="damaged") as raised:
        read_parts(run, SHARD)
    assert "remove this file" in raised.value.hint


@examples(40)
@given(st.lists(st.sets(st.integers(0, 40), min_size=1), min_size=1, max_size=6), st.integers(1, 9))
def test_merge_windows_equal_sorting_everything(tmp_path_factory, parts, window):
    run = RunDirectory(tmp_path_factory.mktemp("run"), worker="host-1-aa")
    run.create()
    expected = {}
    for number, indices in enumerate(parts):
        part(run, sorted(indices), text=f"part {number}")
        expected = dict.fromkeys(indices, f"part {number}") | expected
    merged = pa.concat_tables(merge_windows(part_cursors(list_parts(run, SHARD)), window))
    assert merged["row"].to_pylist() == sorted(expected)
    assert merged["text"].to_pylist() == [expected[index] for index in sorted(expected)]
