"""JSON Lines: which lines are rows, what is wrong with them, and how they are found again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.input.files import LocalFile
from jobrunner.data.input.formats import lines as lines_module
from jobrunner.data.input.formats import text as text_module
from jobrunner.data.input.formats.jsonl import JsonLines
from jobrunner.data.input.formats.text import look_at_text
from jobrunner.data.input.shards import check_unchanged, cut_spans, find_shards, shard_fingerprint
from jobrunner.data.input.sources import Reader
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import Row, RowError, RowId, Span
from tests.data.reading import COMPRESSIONS, kept_of, look, rows_of, values_of, write_bytes
from tests.properties import examples


def write(path: Path, *records: Any) -> Path:
    return write_bytes(path, b"".join(json.dumps(r).encode() + b"\n" for r in records))


def error_of(path: Path, line: bytes) -> RowError:
    """What is said of one line between two good ones."""
    write_bytes(path, b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    first, bad, last = rows_of(look(path, ["prompt"]), "prompt")
    assert (first.value, last.value) == ("a", "b")
    assert bad.error is not None
    return bad.error


def parsed(line: bytes) -> Any:
    try:
        value = json.loads(line.decode())
    except ValueError:
        return "bad_text"
    return value.get("p") if isinstance(value, dict) else "bad_type"


LINES = st.one_of(
    st.builds(lambda v: json.dumps({"p": v}).encode(), st.integers() | st.text(max_size=9)),
    st.sampled_from([b"", b"  ", b"\r", b"7", b"[1]", b"{", b'{"p": "\xff"}', b'{"q": 1}', b"\0"]),
)


class TestRows:
    @pytest.mark.parametrize("suffix", COMPRESSIONS)
    def test_columns_become_values_and_a_missing_key_is_null(
        self, tmp_path: Path, suffix: str
    ) -> None:
        records = [{"prompt": "a", "n": 1}, {"n": [2]}, {"prompt": None, "n": {"x": 3}}]
        path = write(tmp_path / f"a.jsonl{suffix}", *records)
        shards = look(path, ["prompt", "n"])
        name = path.name
        assert rows_of(shards, "prompt", ["n"]) == [
            Row(RowId(name, 0), "a", {"n": 1}),
            Row(RowId(name, 1), None, {"n": [2]}),
            Row(RowId(name, 2), None, {"n": {"x": 3}}),
        ]

    def test_without_a_column_of_prompts_the_value_is_none(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", {"custom_id": "x", "body": {"model": "m"}})
        (row,) = rows_of(look(path, format_name="openai"), None, ["custom_id", "body"])
        assert row.value is None
        assert row.others == {"custom_id": "x", "body": {"model": "m"}}

    def test_blank_lines_are_no_rows_and_the_last_line_may_lack_its_end(
        self, tmp_path: Path
    ) -> None:
        path = write_bytes(tmp_path / "a.jsonl", b'\n \t\r\n{"p": 1}\r\n\n{"p": 2}')
        assert values_of(look(path, ["p"]), "p") == [1, 2]

    def test_byte_order_mark_is_no_part_of_the_first_line(self, tmp_path: Path) -> None:
        path = write_bytes(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"p": 1}\n')
        assert values_of(look(path, ["p"]), "p") == [1]

    def test_last_of_equal_keys_counts(self, tmp_path: Path) -> None:
        path = write_bytes(tmp_path / "a.jsonl", b'{"p": 1, "p": 2}\n')
        assert values_of(look(path, ["p"]), "p") == [2]

    def test_case_M_lone_surrogate_nul_and_emoji_pass_as_text(self, tmp_path: Path) -> None:
        path = write_bytes(tmp_path / "a.jsonl", rb'{"p": "a\ud800 \u0000 \ud83d\ude00"}' + b"\n")
        assert values_of(look(path, ["p"]), "p") == ["a\ud800 \0 😀"]

    @examples(60)
    @given(st.lists(LINES, max_size=20), st.sampled_from(COMPRESSIONS), st.data())
    def test_any_lines_read_in_any_order_are_as_read_one_by_one(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        lines: list[bytes],
        suffix: str,
        data: st.DataObject,
    ) -> None:
        expected = [parsed(line) for line in lines if line and not line.isspace()]
        path = tmp_path_factory.mktemp("in") / f"a.jsonl{suffix}"
        write_bytes(path, b"\n".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_module, "MARK_ROWS", data.draw(st.integers(1, 5)))
            shards = find_shards(str(path), path.parent)
            assert shards[0].rows == len(expected)
            with Reader(shards, "p", (), data.draw(st.integers(1, 4))) as reader:
                for _ in range(4 if expected else 0):
                    start = data.draw(st.integers(0, len(expected) - 1))
                    stop = data.draw(st.integers(start + 1, len(expected)))
                    span = Span(path.name, start, stop)
                    rows = [row for batch in reader.read(span) for row in batch]
                    assert [row.id.index for row in rows] == list(range(start, stop))
                    found = [row.error.kind if row.error else row.value for row in rows]
                    assert found == expected[start:stop]


class TestBadLines:
    @pytest.mark.parametrize(
        ("line", "kind", "message"),
        [
            (b"[1]", "bad_type", "the line is an array, not an object"),
            (b'"x"', "bad_type", "the line is a string, not an object"),
            (b"null", "bad_type", "the line is null, not an object"),
            (b"true", "bad_type", "the line is a boolean, not an object"),
            (b"1.5", "bad_type", "the line is a number, not an object"),
            (
                b'{"prompt": }',
                "bad_text",
                "the line is not JSON: Expecting value at character 11 of the line",
            ),
            (
                b'{"prompt": "\xff"}',
                "bad_text",
                "the line is not UTF-8: byte 0xff at position 12 of the line",
            ),
            (b'{"prompt": NaN}', "bad_text", "the line is not JSON: it has NaN"),
            (b'{"prompt": -Infinity}', "bad_text", "the line is not JSON: it has -Infinity"),
            (
                b'{"prompt": 1e999}',
                "bad_text",
                "the line is not JSON: the number 1e999 is beyond 64 bits",
            ),
        ],
    )
    def test_bad_line_is_an_error_with_its_reason(
        self, tmp_path: Path, line: bytes, kind: str, message: str
    ) -> None:
        error = error_of(tmp_path / "a.jsonl", line)
        assert (error.kind, error.message) == (kind, f"row 1 of `a.jsonl`: {message}")

    def test_nesting_without_end_is_an_error(self, tmp_path: Path) -> None:
        line = b'{"prompt": ' + b"[" * 200_000
        assert error_of(tmp_path / "a.jsonl", line).kind == "bad_text"

    def test_number_of_thousands_of_digits_is_an_error(self, tmp_path: Path) -> None:
        assert (
            error_of(tmp_path / "a.jsonl", b'{"prompt": ' + b"1" * 5_000 + b"}").kind == "bad_text"
        )

    @pytest.mark.parametrize("end", [b"", b"\n", b'\n{"prompt": "last"}'])
    @pytest.mark.parametrize("size", [999, 1_000, 1_001, 1_002, 1_064, 5_000])
    def test_line_over_the_limit_is_an_error_and_reading_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: bytes
    ) -> None:
        monkeypatch.setattr(lines_module, "LINE_BYTES", 1_000)
        monkeypatch.setattr(lines_module, "_BUFFER_BYTES", 64)
        text = "x" * (size - len('{"prompt": ""}'))
        line = f'{{"prompt": "{text}"}}'.encode()
        path = write_bytes(tmp_path / "a.jsonl", b'{"prompt": "a"}\n' + line + end)
        long = text if size <= 1_000 else "bad_text"
        last = ["last"] if len(end) > 1 else []
        assert values_of(look(path, ["prompt"]), "prompt") == ["a", long, *last]

    def test_utf16_is_refused(self, tmp_path: Path) -> None:
        path = write_bytes(tmp_path / "a.jsonl", '{"p": 1}\n'.encode("utf-16"))
        with pytest.raises(ConfigError, match=r"a\.jsonl` is UTF-16, not UTF-8"):
            look(path)

    @pytest.mark.parametrize("suffix", [".gz", ".zst"])
    def test_compressed_file_cut_short_is_refused(self, tmp_path: Path, suffix: str) -> None:
        path = write_bytes(tmp_path / f"a.jsonl{suffix}", os.urandom(90_000).hex().encode())
        os.truncate(path, 20_000)
        with pytest.raises(ConfigError, match="cannot be decompressed"):
            look(path)

    @pytest.mark.parametrize("suffix", [".gz", ".zst"])
    def test_compressed_pieces_one_after_another_are_one_text(
        self, tmp_path: Path, suffix: str
    ) -> None:
        first = write(tmp_path / f"1{suffix}", {"p": 1}).read_bytes()
        second = write(tmp_path / f"2{suffix}", {"p": 2}).read_bytes()
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(first + second)
        assert values_of(look(path, ["p"]), "p") == [1, 2]


class TestColumns:
    def test_column_that_no_row_of_any_file_has_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "in" / "a.jsonl", {"prompt": "x"}, {"id": 1})
        with pytest.raises(ConfigError) as caught:
            look(tmp_path / "in", ["promt"])
        assert str(caught.value) == "`a.jsonl` has no column `promt`"
        assert caught.value.hint == "did you mean `prompt`? its columns are `prompt`, `id`"

    def test_column_of_one_late_row_is_enough(self, tmp_path: Path) -> None:
        write(tmp_path / "in" / "a.jsonl", {"prompt": "x"}, {"prompt": "y"})
        write(tmp_path / "in" / "b.jsonl", {"prompt": "z", "tools": [1]})
        rows = rows_of(look(tmp_path / "in", ["prompt", "tools"]), "prompt", ["tools"])
        assert [row.others["tools"] for row in rows] == [None, None, [1]]

    def test_case_W_file_without_rows_has_no_say(self, tmp_path: Path) -> None:
        write(tmp_path / "in" / "a.jsonl")
        write(tmp_path / "in" / "b.jsonl", {"prompt": "z"})
        shards = look(tmp_path / "in", ["prompt"])
        assert [shard.rows for shard in shards] == [0, 1]
        assert cut_spans(shards) == [Span("b.jsonl", 0, 1)]

    def test_file_of_bad_lines_only_has_error_rows(self, tmp_path: Path) -> None:
        path = write_bytes(tmp_path / "a.jsonl", b"{\n[\n")
        assert values_of(look(path, ["prompt"], ["id"]), "prompt") == ["bad_text", "bad_text"]


class TestKeptColumns:
    @pytest.mark.parametrize(
        ("values", "type_", "kept"),
        [
            (["a", None, "ü"], pa.string(), ["a", None, "ü"]),
            ([1, 2**62, None], pa.int64(), [1, 2**62, None]),
            ([1, 2.5], pa.float64(), [1.0, 2.5]),
            ([True, None, False], pa.bool_(), [True, None, False]),
            ([None, None], pa.string(), [None, None]),
            ([1, 2**63], pa.string(), ["1", str(2**63)]),
            ([2**53 + 1, 0.5], pa.string(), [str(2**53 + 1), "0.5"]),
            (["a", 1, None], pa.string(), ['"a"', "1", None]),
            ([True, 1], pa.string(), ["true", "1"]),
            ([{"x": ["é"]}, []], pa.string(), ['{"x": ["é"]}', "[]"]),
            ([["\ud800"], "a"], pa.string(), ['["\\ud800"]', '"a"']),
            (["a\ud800b"], pa.string(), ["a\ufffdb"]),
        ],
        ids=str,
    )
    def test_one_type_holds_all_values(
        self, tmp_path: Path, values: list[Any], type_: pa.DataType, kept: list[Any]
    ) -> None:
        # over two files, the second with a key and a line less
        write(tmp_path / "in" / "a.jsonl", *({"id": value} for value in values[:-1]))
        write(tmp_path / "in" / "b.jsonl", {"id": values[-1]}, {"other": 1})
        with (tmp_path / "in" / "b.jsonl").open("ab") as file:
            file.write(b"broken\n")
        table = kept_of(tmp_path / "in", "id")
        assert table.schema.field("id").type == type_
        assert table["id"].to_pylist() == [*kept, None, None]

    def test_columns_kept_as_json_are_told_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(tmp_path / "a.jsonl", {"id": [1], "n": 1})
        with caplog.at_level("INFO", "cbjob"):
            look(tmp_path / "a.jsonl", [], ["id", "n"])
        assert caplog.messages == [
            "kept as JSON text, having nested values or values of several types: `id`"
        ]


class TestChanges:
    def test_case_C_fingerprint_is_of_bytes_not_of_time(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", {"p": 1})
        before = shard_fingerprint(look(path)[0])
        os.utime(path, (1, 1))
        assert shard_fingerprint(look(path)[0]) == before
        assert set(before) == {"size", "rows", "content"}
        write(path, {"p": 2})
        assert shard_fingerprint(look(path)[0]) != before

    def test_touched_file_is_unchanged_and_a_changed_one_is_not(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", {"p": 1})
        (shard,) = look(path)
        os.utime(path, (1, 1))
        check_unchanged(shard)
        write(path, {"p": 2})
        os.utime(path, (2, 2))
        with pytest.raises(InfrastructureError, match="changed while the job ran"):
            check_unchanged(shard)
        with pytest.raises(InfrastructureError, match="changed while the job ran"):
            rows_of([shard], "p")

    def test_unchanged_file_is_not_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (shard,) = look(write(tmp_path / "a.jsonl", {"p": 1}))
        monkeypatch.delattr(text_module, "_hash")
        check_unchanged(shard)

    def test_file_that_changes_while_it_is_looked_at_is_not_taken(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", {"p": 1}, {"p": 2})
        whole = path.read_bytes()

        def copy_on(record: object) -> bool:
            path.write_bytes(whole * 2)
            return False

        with pytest.raises(InfrastructureError, match=r"a\.jsonl` changed while it was looked at"):
            look_at_text(LocalFile(path), lambda _: (JsonLines(), pa.schema([])), copy_on)

    def test_file_that_is_gone_is_an_infrastructure_fault(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", {"p": 1})
        (shard,) = look(path)
        path.unlink()
        with pytest.raises(InfrastructureError, match=r"cannot read `.*a\.jsonl`"):
            rows_of([shard], "p")

    @pytest.mark.parametrize("suffix", ["", ".zst"])
    def test_file_cut_short_while_reading_is_an_infrastructure_fault(
        self, tmp_path: Path, suffix: str
    ) -> None:
        path = tmp_path / f"a.jsonl{suffix}"
        write(path, *({"p": os.urandom(400).hex()} for _ in range(3_000)))
        (shard,) = look(path)
        with Reader([shard], "p") as reader:
            batches = reader.read(Span(path.name, 0, 2_048))
            next(batches)
            os.truncate(path, 600_000)
            with pytest.raises(InfrastructureError, match=r"cannot read `.*a\.jsonl"):
                list(batches)


class TestStreaming:
    def test_case_W_big_prompt_between_short_ones(self, tmp_path: Path) -> None:
        texts = ["short"] * 70 + ["x" * 1_000_000] + ["short"] * 70
        path = write(tmp_path / "a.jsonl", *({"p": text} for text in texts))
        assert values_of(look(path, ["p"]), "p") == texts

    def test_batch_ends_early_after_many_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(text_module, "_BATCH_BYTES", 1_000)
        path = write(tmp_path / "a.jsonl", *({"p": "x" * 600} for _ in range(9)))
        with Reader(look(path), "p") as reader:
            batches = list(reader.read(Span("a.jsonl", 0, 9)))
        assert [len(batch) for batch in batches] == [2, 2, 2, 2, 1]

    def test_span_is_read_from_its_place_in_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path / "a.jsonl", *({"p": row} for row in range(5_000)))
        (shard,) = look(path)
        seeks = []
        seek = lines_module.Lines.seek

        def watched(lines: Any, offset: int) -> None:
            seeks.append(offset)
            seek(lines, offset)

        monkeypatch.setattr(lines_module.Lines, "seek", watched)
        with Reader([shard], "p") as reader:
            (row, *_) = next(reader.read(Span("a.jsonl", 4_096, 4_100)))
        assert row.value == 4_096
        assert seeks == [sum(len(f'{{"p": {row}}}\n') for row in range(4_096))]
