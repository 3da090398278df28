"""Ids that are not unique are found, each row of them, without all ids in memory."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.input.ids import IdReport, UniqueIds
from jobrunner.records import Row, RowId

IDS = st.one_of(st.none(), st.text(max_size=2), st.integers(0, 3), st.sampled_from("aab"))


def rows_of(ids: Sequence[object], shards: int = 1) -> list[Row]:
    """Rows with these ids, spread over shards in order."""
    per_shard = -(-len(ids) // shards)
    return [
        Row(RowId(f"{i // per_shard}.parquet", i % per_shard), id_) for i, id_ in enumerate(ids)
    ]


def check(rows: Sequence[Row], examples: int = 10**6, **options: int) -> IdReport:
    with UniqueIds(examples, **options) as unique:
        unique.add(rows)
        return unique.report()


def obvious(rows: Sequence[Row]) -> list[tuple[RowId, RowId | None]]:
    """Rows without an id of their own, with the earlier row that has it, by a plain dict."""
    found: list[tuple[RowId, RowId | None]] = []
    seen: dict[tuple[type, object], RowId] = {}
    for row in rows:
        key = (type(row.value), row.value)
        if row.value is None:
            found.append((row.id, None))
        elif key in seen:
            found.append((row.id, seen[key]))
        else:
            seen[key] = row.id
    return found


@given(st.lists(IDS, max_size=60), st.integers(1, 4), st.integers(1, 5), st.integers(1, 200))
def test_every_row_without_an_id_of_its_own_is_found(ids, shards, partitions, partition_bytes):
    rows = rows_of(ids, shards)
    report = check(rows, partitions=partitions, partition_bytes=partition_bytes)
    expected = obvious(rows)
    assert report.count == len(expected)
    assert sorted((p.row, p.earlier or ()) for p in report.first) == sorted(
        (row, earlier or ()) for row, earlier in expected
    )


def test_case_O_the_rows_are_named():
    report = check(rows_of(["a", "b", "a", None]))
    assert [str(problem) for problem in report.first] == [
        'rows 0 and 2 of `0.parquet` have the same id "a"',
        "row 3 of `0.parquet` has no id",
    ]


def test_a_repeat_in_another_shard_names_both():
    [problem] = check(rows_of(["a", "b", "c", "a"], shards=2)).first
    assert str(problem) == 'rows 0 of `0.parquet` and 1 of `1.parquet` have the same id "a"'


def test_a_number_is_not_its_text():
    assert check(rows_of([1, "1", 1.0, True])).count == 0


def test_only_the_first_examples_are_kept():
    report = check(rows_of(["a"] * 50 + [None] * 50), examples=3)
    assert report.count == 99
    assert [problem.row.index for problem in report.first] == [1, 2, 3]


def test_a_partition_that_holds_one_id_only_ends():
    assert check(rows_of(["a"] * 100), partition_bytes=1).count == 99


def test_a_lone_surrogate_is_an_id_like_others():
    assert check(rows_of(["\ud800", "\ud800"])).count == 1
