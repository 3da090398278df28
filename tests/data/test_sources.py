"""Shards, spans and streams of rows, on real Parquet files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.input import columns as columns_module
from jobrunner.data.input.files import LocalFile
from jobrunner.data.input.formats.content import Wanted
from jobrunner.data.input.shards import (
    Shard,
    check_unchanged,
    cut_spans,
    find_shards,
    limit_shards,
    shard_fingerprint,
)
from jobrunner.data.input.sources import Reader, read_columns
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import Row, RowId, Span
from tests.properties import examples


def write(path: Path, columns: dict[str, Any], *, groups: Sequence[int] | None = None) -> Path:
    """Write a Parquet file with row groups of the given sizes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    with pq.ParquetWriter(path, table.schema) as writer:
        start = 0
        for rows in groups or [table.num_rows]:
            writer.write_table(table.slice(start, rows), row_group_size=max(rows, 1))
            start += rows
    return path


def prompts(count: int, start: int = 0) -> dict[str, list[str]]:
    return {"prompt": [f"prompt {index}" for index in range(start, start + count)]}


def shard_of(path: Path) -> Shard:
    return find_shards(str(path), path.parent)[0]


def not_utf8(values: list[bytes]) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values).buffers())


def read_all(shards: Sequence[Shard], column: str = "prompt", **options: Any) -> list[Row]:
    with Reader(shards, column) as reader:
        return [
            row
            for span in cut_spans(shards)
            for batch in reader.read(span, **options)
            for row in batch
        ]


def check_columns(shards: Sequence[Shard], needed: list[str], kept: list[str]) -> pa.Schema:
    return columns_module.check_columns(shards, Wanted(tuple(needed), tuple(kept)))


def columns_of(shard: Shard, *columns: str) -> list[pa.RecordBatch]:
    return list(read_columns(shard, check_columns([shard], [], list(columns))))


def names(shards: Sequence[Shard]) -> list[str]:
    return [shard.name for shard in shards]


class TestFindShards:
    def test_folder_is_searched_deep_and_sorted_without_hidden_names(self, tmp_path: Path) -> None:
        for name in (
            "b.parquet",
            "a/z.parquet",
            "a/b/c.parquet",
            ".hidden.parquet",
            "_tmp.parquet",
            "_temporary/0.parquet",
            ".cbjob/parts/1.parquet",
        ):
            write(tmp_path / "in" / name, prompts(2))
        (tmp_path / "in" / "README.md").write_text("not data")
        found = find_shards("in", tmp_path)
        assert names(found) == ["a/b/c.parquet", "a/z.parquet", "b.parquet"]
        assert [shard.rows for shard in found] == [2, 2, 2]

    def test_single_file_may_have_any_name(self, tmp_path: Path) -> None:
        write(tmp_path / "deep" / "data.pq", prompts(3))
        (shard,) = find_shards("deep/data.pq", tmp_path)
        assert shard.name == "data.pq"
        assert shard.file == LocalFile(tmp_path / "deep" / "data.pq")
        assert shard.rows == 3

    def test_glob_names_start_below_its_longest_fixed_folder(self, tmp_path: Path) -> None:
        for name in ("in/x/1.parquet", "in/y/2.parquet", "in/y/deep/3.parquet", "in/_o/4.parquet"):
            write(tmp_path / name, prompts(1))
        assert names(find_shards("in/*/*.parquet", tmp_path)) == ["x/1.parquet", "y/2.parquet"]
        assert names(find_shards("in/**/*.parquet", tmp_path)) == [
            "x/1.parquet",
            "y/2.parquet",
            "y/deep/3.parquet",
        ]
        assert names(find_shards("in/y/[0-9].parquet", tmp_path)) == ["2.parquet"]
        assert names(find_shards("in/_o/*", tmp_path)) == ["4.parquet"]

    def test_glob_characters_in_a_real_name_are_no_glob(self, tmp_path: Path) -> None:
        base = tmp_path / "run [1]"
        write(base / "a[0].parquet", prompts(1))
        assert names(find_shards("a[0].parquet", base)) == ["a[0].parquet"]
        assert names(find_shards("*.parquet", base)) == ["a[0].parquet"]

    @pytest.mark.parametrize("path", ["nothing", "empty", "empty/*.parquet"])
    def test_nothing_found_is_refused(self, tmp_path: Path, path: str) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError) as caught:
            find_shards(path, tmp_path)
        assert f"`{path}`" in str(caught.value)
        assert caught.value.hint

    @pytest.mark.parametrize("content", [b"", b"id,prompt\n1,hello\n", b"PAR1" + bytes(40)])
    def test_file_that_is_not_parquet_is_refused_by_name(
        self, tmp_path: Path, content: bytes
    ) -> None:
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.parquet` is not a Parquet file"):
            find_shards("a.parquet", tmp_path)


class TestFingerprint:
    def test_case_C_touched_or_copied_file_is_the_same(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", prompts(10))
        before = shard_fingerprint(shard_of(path))
        os.utime(path, (1, 1))
        copy = tmp_path / "copy.parquet"
        copy.write_bytes(path.read_bytes())
        assert shard_fingerprint(shard_of(path)) == before
        assert shard_fingerprint(shard_of(copy)) == before
        assert set(before) == {"size", "rows", "footer"}

    def test_case_C_inserted_row_or_new_values_are_seen(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", prompts(10))
        before = shard_fingerprint(shard_of(path))
        write(path, {"prompt": ["new", *prompts(10)["prompt"]]})
        inserted = shard_fingerprint(shard_of(path))
        write(path, prompts(10, start=5))
        changed = shard_fingerprint(shard_of(path))
        assert inserted["rows"] == 11
        assert before["footer"] != inserted["footer"] != changed["footer"] != before["footer"]

    def test_file_that_is_gone_is_an_infrastructure_fault(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", prompts(1))
        shard = shard_of(path)
        path.unlink()
        with pytest.raises(InfrastructureError, match=r"a\.parquet"):
            check_unchanged(shard)

    def test_what_is_identified_is_what_was_looked_at(self, tmp_path: Path) -> None:
        """A careless copy may cut the file short for a moment, right after that."""
        path = write(tmp_path / "a.parquet", prompts(10))
        expected = shard_fingerprint(shard_of(path))
        whole = path.read_bytes()
        shard = shard_of(path)
        path.write_bytes(whole[: len(whole) // 2])
        assert shard_fingerprint(shard) == expected
        with pytest.raises(InfrastructureError, match="changed while the job ran"):
            check_unchanged(shard)
        path.write_bytes(whole)
        check_unchanged(shard)


@dataclass(frozen=True)
class Rows:
    """What a limit looks at of a shard."""

    name: str
    rows: int


class TestLimit:
    @given(st.lists(st.integers(0, 6), max_size=5), st.integers(1, 20))
    def test_first_rows_stay(self, sizes: list[int], limit: int) -> None:
        shards = [Rows(str(index), rows) for index, rows in enumerate(sizes)]
        everything = [(shard.name, row) for shard in shards for row in range(shard.rows)]
        kept = limit_shards(shards, limit)
        assert [(shard.name, row) for shard in kept for row in range(shard.rows)] == everything[
            :limit
        ]

    def test_cut_shard_streams_its_first_rows_only(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", prompts(5), groups=[3, 2])
        write(tmp_path / "b.parquet", prompts(9), groups=[2, 2, 5])
        shards = limit_shards(find_shards("*.parquet", tmp_path), 8)
        assert [row.id for row in read_all(shards)] == [
            *(RowId("a.parquet", row) for row in range(5)),
            *(RowId("b.parquet", row) for row in range(3)),
        ]
        assert sum(batch.num_rows for batch in columns_of(shards[1], "prompt")) == 3


def spans_by_the_rule(groups: list[int], span_rows: int) -> list[tuple[int, int]]:
    """Slow reference: which neighbouring rows may not be torn, then greedy filling."""
    spans: list[list[int]] = []
    row = 0
    open_span = False
    for size in groups:
        if size > span_rows:
            cuts = [*range(row, row + size, span_rows), row + size]
            spans += [[start, stop] for start, stop in pairwise(cuts)]
            open_span = False
        elif size:
            if open_span and spans[-1][1] - spans[-1][0] + size <= span_rows:
                spans[-1][1] += size
            else:
                spans.append([row, row + size])
            open_span = True
        row += size
    return [(start, stop) for start, stop in spans]


class TestSpans:
    @examples(40)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 8))
    def test_spans_follow_row_groups(
        self, tmp_path_factory: pytest.TempPathFactory, groups: list[int], span_rows: int
    ) -> None:
        folder = tmp_path_factory.mktemp("spans")
        shard = shard_of(write(folder / "a.parquet", prompts(sum(groups)), groups=groups))
        spans = cut_spans([shard], span_rows=span_rows)
        assert [(span.start, span.stop) for span in spans] == spans_by_the_rule(groups, span_rows)

    def test_case_W_shard_without_rows_has_no_span(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"prompt": pa.array([], pa.string())})
        write(tmp_path / "b.parquet", prompts(1))
        shards = find_shards("*.parquet", tmp_path)
        assert [shard.rows for shard in shards] == [0, 1]
        assert cut_spans(shards) == [Span("b.parquet", 0, 1)]
        assert columns_of(shards[0], "prompt") == []


class TestColumns:
    def test_kept_schema_is_returned(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {**prompts(1), "id": [1], "tags": [["x"]]})
        schema = check_columns(find_shards(".", tmp_path), ["prompt"], ["tags", "id"])
        assert schema.names == ["tags", "id"]
        assert schema.field("tags").type == pa.list_(pa.string())

    def test_unknown_column_lists_nearest_and_all(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {**prompts(1), "id": [1]})
        with pytest.raises(ConfigError) as caught:
            check_columns(find_shards(".", tmp_path), ["promt"], [])
        assert str(caught.value) == "`a.parquet` has no column `promt`"
        assert caught.value.hint == "did you mean `prompt`? its columns are `prompt`, `id`"

    def test_column_missing_in_a_later_shard_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", prompts(1))
        write(tmp_path / "b.parquet", {"question": ["x"]})
        with pytest.raises(ConfigError, match=r"`b\.parquet` has no column `prompt`"):
            check_columns(find_shards(".", tmp_path), ["prompt"], [])

    def test_kept_column_of_two_types_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {**prompts(1), "id": [1]})
        write(tmp_path / "b.parquet", {**prompts(1), "id": ["1"]})
        shards = find_shards(".", tmp_path)
        with pytest.raises(ConfigError) as caught:
            check_columns(shards, ["prompt"], ["id"])
        assert str(caught.value) == (
            "kept column `id` is string in `b.parquet` and int64 in `a.parquet`"
        )
        assert check_columns(shards, ["id"], ["prompt"]).names == ["prompt"]

    def test_kept_column_named_like_a_result_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {**prompts(1), "text": ["x"]})
        shards = find_shards(".", tmp_path)
        with pytest.raises(ConfigError, match="`text` has the name of a result column"):
            check_columns(shards, ["prompt"], ["text"])
        assert check_columns(shards, ["text"], []).names == []

    def test_case_W_carried_types_survive_in_row_order(self, tmp_path: Path) -> None:
        columns = {
            "large": pa.array([f"text {row}" for row in range(700)], pa.large_string()),
            "kind": pa.array(["a", "b"] * 350).dictionary_encode(),
            "turns": pa.array(
                [[{"role": "user", "content": str(row)}] for row in range(700)],
                pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            ),
        }
        path = write(tmp_path / "a.parquet", columns, groups=[100, 600])
        schema = check_columns([shard_of(path)], [], ["turns", "large", "kind"])
        batches = columns_of(shard_of(path), "turns", "large", "kind")
        assert all(batch.num_rows <= 256 for batch in batches)
        carried = pa.Table.from_batches(batches, schema)
        assert carried.to_pylist() == pa.table(columns).select(schema.names).to_pylist()
        assert carried.schema.types == [columns[name].type for name in schema.names]

    def test_no_carried_columns_still_count_rows(self, tmp_path: Path) -> None:
        shard = shard_of(write(tmp_path / "a.parquet", prompts(300)))
        assert sum(batch.num_rows for batch in columns_of(shard)) == 300


class CountingFile:
    """Wraps what a reader iterates over and counts decoded rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        self.opened = 0
        original = pq.ParquetFile.iter_batches

        def counted(file: Any, **options: Any) -> Any:
            self.opened += 1
            for batch in original(file, **options):
                self.rows += batch.num_rows
                yield batch

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)


class TestReader:
    @examples(60)
    @given(data=st.data())
    def test_any_spans_in_any_order_with_any_rows_skipped(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        groups = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
        rows = sum(groups)
        folder = tmp_path_factory.mktemp("reader")
        shard = shard_of(write(folder / "a.parquet", prompts(rows), groups=groups))
        skip = data.draw(st.sets(st.integers(0, rows)))
        batch_rows = data.draw(st.integers(1, 5))
        with Reader([shard], "prompt", (), batch_rows) as reader:
            for _ in range(4):
                start = data.draw(st.integers(0, rows - 1))
                stop = data.draw(st.integers(start + 1, rows))
                batches = list(reader.read(Span("a.parquet", start, stop), skip))
                assert all(0 < len(batch) <= batch_rows for batch in batches)
                assert [row for batch in batches for row in batch] == [
                    Row(RowId("a.parquet", index), f"prompt {index}")
                    for index in range(start, stop)
                    if index not in skip
                ]

    def test_reader_moves_between_shards(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", prompts(3))
        write(tmp_path / "b.parquet", prompts(3, start=3))
        rows = read_all(find_shards(".", tmp_path))
        assert [row.value for row in rows] == prompts(6)["prompt"]

    def test_case_W_huge_row_group_is_streamed_and_decoded_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = 200_000
        shard = shard_of(write(tmp_path / "a.parquet", {"prompt": ["x"] * rows}))
        spans = cut_spans([shard])
        counting = CountingFile(monkeypatch)
        with Reader([shard], "prompt") as reader:
            first = next(reader.read(spans[0]))
            assert len(first) == counting.rows <= 64
            for span in spans:
                assert sum(len(batch) for batch in reader.read(span)) == span.stop - span.start
        # the first span was left after its first batch and begun again: one more opening
        assert counting.opened == 2
        assert counting.rows <= rows + 64

    def test_case_W_memory_stays_small_inside_a_huge_row_group(self, tmp_path: Path) -> None:
        texts = [os.urandom(500).hex() for _ in range(20_000)]
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"prompt": texts}), path, use_dictionary=False, compression=None)
        shard = shard_of(path)
        before = pa.total_allocated_bytes()
        with Reader([shard], "prompt") as reader:
            next(reader.read(Span("a.parquet", 0, 64)))
            held = pa.total_allocated_bytes() - before
        assert path.stat().st_size > 20_000_000
        assert held < 5_000_000

    def test_case_W_big_prompt_between_short_ones(self, tmp_path: Path) -> None:
        texts = ["short"] * 70 + ["x" * 1_000_000] + ["short"] * 70
        rows = read_all([shard_of(write(tmp_path / "a.parquet", {"prompt": texts}))])
        assert [row.value for row in rows] == texts

    @pytest.mark.parametrize(
        "column",
        [
            pa.array(["a", None, "a"], pa.large_string()),
            pa.array(["a", None, "a"]).dictionary_encode(),
            pa.array([1, None, 3]),
            pa.array([[{"role": "user", "content": "hi"}], None, []]),
            pa.nulls(3),
        ],
        ids=["large_string", "dictionary", "int64", "messages", "null"],
    )
    def test_case_W_columns_of_any_type_become_python_values(
        self, tmp_path: Path, column: pa.Array
    ) -> None:
        rows = read_all([shard_of(write(tmp_path / "a.parquet", {"prompt": column}))])
        assert [row.value for row in rows] == column.to_pylist()

    def test_case_M_text_that_is_not_utf8_comes_as_bytes(self, tmp_path: Path) -> None:
        texts = not_utf8([b"ok", b"\xff\xfe", "😀 \0".encode()])
        turns = pa.ListArray.from_arrays(
            pa.array([0, 1, 2, 3], pa.int32()),
            pa.StructArray.from_arrays([texts, texts], ["role", "content"]),
        )
        columns = {"flat": texts, "coded": texts.dictionary_encode(), "turns": turns}
        shard = shard_of(write(tmp_path / "a.parquet", columns))
        values = {name: [row.value for row in read_all([shard], name)] for name in columns}
        assert values["flat"] == values["coded"] == ["ok", b"\xff\xfe", "😀 \0"]
        assert values["turns"] == [
            [{"role": "ok", "content": "ok"}],
            b"\xff\xfe",
            [{"role": "😀 \0", "content": "😀 \0"}],
        ]

    def test_value_that_python_cannot_hold_comes_as_its_scalar(self, tmp_path: Path) -> None:
        columns = {"prompt": pa.array([0, 2**61], pa.timestamp("ms"))}
        good, odd = read_all([shard_of(write(tmp_path / "a.parquet", columns))])
        assert not isinstance(good.value, pa.Scalar)
        assert isinstance(odd.value, pa.Scalar)

    def test_file_cut_short_while_reading_is_an_infrastructure_fault(self, tmp_path: Path) -> None:
        texts = {"prompt": [os.urandom(200).hex() for _ in range(5_000)]}
        path = write(tmp_path / "a.parquet", texts, groups=[1_000] * 5)
        shard = shard_of(path)
        reader = Reader([shard], "prompt")
        batches = reader.read(Span("a.parquet", 0, 5_000))
        next(batches)
        os.truncate(path, 1_000_000)
        with pytest.raises(InfrastructureError, match=r"cannot read `.*a\.parquet`"):
            list(batches)

    @pytest.mark.parametrize("rows", [9, 11])
    def test_file_with_another_row_count_is_an_infrastructure_fault(
        self, tmp_path: Path, rows: int
    ) -> None:
        path = write(tmp_path / "a.parquet", prompts(10))
        shard = shard_of(path)
        write(path, prompts(rows))
        with pytest.raises(InfrastructureError, match=f"has {rows} rows now, 10 when"):
            list(Reader([shard], "prompt").read(Span("a.parquet", 0, 9)))
        with pytest.raises(InfrastructureError, match=f"has {rows} rows now, 10 when"):
            columns_of(shard, "prompt")

    def test_file_that_is_gone_is_an_infrastructure_fault(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", prompts(3))
        shard = shard_of(path)
        path.unlink()
        with pytest.raises(InfrastructureError, match=r"cannot read `.*a\.parquet`"):
            list(Reader([shard], "prompt").read(Span("a.parquet", 0, 3)))
