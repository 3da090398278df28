"""CSV: which records are rows, and what is wrong with them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.input.formats import text as text_module
from jobrunner.data.input.shards import find_shards
from jobrunner.data.input.sources import Reader
from jobrunner.errors import ConfigError
from jobrunner.records import RowError, Span
from tests.data.reading import COMPRESSIONS, kept_of, look, rows_of, values_of, write_bytes
from tests.properties import examples


def errors_of(path: Path, content: bytes, column: str = "a") -> list[RowError | None]:
    return [row.error for row in rows_of(look(write_bytes(path, content), [column]), column)]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_every_field_is_text(tmp_path: Path, suffix: str) -> None:
    path = write_bytes(tmp_path / f"a.csv{suffix}", b'id,prompt\r\n1,"a ""b"",\nc"\r\n,2.5\r\n')
    rows = rows_of(look(path, ["prompt", "id"]), "prompt", ["id"])
    assert [(row.value, row.others["id"]) for row in rows] == [('a "b",\nc', "1"), ("2.5", "")]


def test_byte_order_mark_empty_lines_and_a_missing_last_line_end(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.csv", b"\xef\xbb\xbf\na,b\n\n1,2\n\r\n3,4")
    assert values_of(look(path, ["a"]), "a") == ["1", "3"]


def test_record_with_another_number_of_fields_is_an_error_row(tmp_path: Path) -> None:
    found = errors_of(tmp_path / "a.csv", b"a,b\n1,2\n1\n1,2,3\n1,2\n")
    assert found == [
        None,
        RowError("bad_type", "row 1 of `a.csv`: the record has 1 fields, the header 2"),
        RowError("bad_type", "row 2 of `a.csv`: the record has 3 fields, the header 2"),
        None,
    ]


def test_field_that_is_not_utf8_is_an_error_row(tmp_path: Path) -> None:
    found = errors_of(tmp_path / "a.csv", b"a,b\n1,\xff\n1,2\n")
    assert found == [
        RowError("bad_text", "row 0 of `a.csv`: the field of column `b` is not UTF-8"),
        None,
    ]


def test_quote_out_of_place_is_an_error_row_and_reading_goes_on(tmp_path: Path) -> None:
    first, second, third = errors_of(tmp_path / "a.csv", b'a,b\n"1"x,2\n1,2\n1,"2\n')
    assert first is not None
    assert first.kind == "bad_text"
    assert second is None
    assert third == RowError(
        "bad_text", "row 2 of `a.csv`: the record is not CSV: unexpected end of data"
    )


def test_case_W_field_of_a_megabyte(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.csv", b'a\n"' + b"x\n" * 500_000 + b'"\nlast\n')
    assert [len(value) for value in values_of(look(path, ["a"]), "a")] == [1_000_000, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b,a\n1,2,3\n", "has 2 columns `a`"),
        (b'"a\n', "the header of .* cannot be read: the record is not CSV"),
        (b"a,\xff\n", "the header of .* is not UTF-8"),
    ],
)
def test_header_that_cannot_be_used_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        look(write_bytes(tmp_path / "a.csv", content))


def test_unknown_column_is_refused_with_the_header(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.csv", b"id;prompt\n1;x\n")
    with pytest.raises(ConfigError, match=r"`a\.csv` has no column `prompt`") as caught:
        look(path, ["prompt"])
    assert caught.value.hint.endswith("its columns are `id;prompt`")


@pytest.mark.parametrize("content", [b"", b"\n", b"a,b\n"])
def test_case_W_file_without_records_has_no_rows(tmp_path: Path, content: bytes) -> None:
    (shard,) = look(write_bytes(tmp_path / "a.csv", content), ["a"])
    assert shard.rows == 0


def test_kept_columns_are_text(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.csv", b"id,n\nx,1\nbroken\ny,\n")
    assert kept_of(path, "n", "id").equals(pa.table({"n": ["1", None, ""], "id": ["x", None, "y"]}))


TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ['"', "\n", "\r\n", ",", "\0", 'a"b', "\r"]
)


@examples(60)
@given(
    st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(TEXT, min_size=n, max_size=n))),
    st.sampled_from(COMPRESSIONS),
    st.data(),
)
def test_what_a_csv_writer_writes_is_read_again_from_any_row(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[list[str]],
    suffix: str,
    data: st.DataObject,
) -> None:
    columns = [f"c{index}" for index in range(len(records[0]) if records else 1)]
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows([columns, *records])
    path = tmp_path_factory.mktemp("in") / f"a.csv{suffix}"
    write_bytes(path, written.getvalue().encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "MARK_ROWS", data.draw(st.integers(1, 5)))
        shards = find_shards(str(path), path.parent)
        assert shards[0].rows == len(records)
        if records:
            start = data.draw(st.integers(0, len(records) - 1))
            with Reader(shards, None, columns) as reader:
                batches = reader.read(Span(path.name, start, len(records)))
                rows = [list(row.others.values()) for batch in batches for row in batch]
            assert rows == records[start:]
