"""What a step of reading Parquet takes is bounded by its page headers, and changes no value."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.data.input.formats import bounds
from jobrunner.data.input.formats.pages import chunk_size, longest_in_dictionary
from jobrunner.errors import ConfigError, InfrastructureError
from tests.data.reading import kept_of, look, rows_of, values_of

ROWS = 500


def records() -> dict[str, Any]:
    """Columns of many types; texts come again, so that dictionaries are made of them."""
    draws = random.Random(7)
    texts = [draws.choice("abé") * draws.randrange(300) for _ in range(20)]

    def some(count: int) -> list[Any]:
        return [draws.choice([*texts, None]) for _ in range(count)]

    turns = [
        [{"role": "user", "content": text} for text in some(draws.randrange(5))]
        for _ in range(ROWS)
    ]
    return {
        "prompt": some(ROWS),
        "number": list(range(ROWS)),
        "turns": turns,
        "ids": [[draws.randrange(9) for _ in range(draws.randrange(9))] for _ in range(ROWS)],
        "pair": [{"a": text, "b": 1.5} for text in some(ROWS)],
    }


WRITINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "version 2 pages": {"data_page_version": "2.0", "compression": "zstd"},
    "plain": {"use_dictionary": False, "compression": "none"},
    "small pages": {"data_page_size": 200, "write_batch_size": 10, "compression": "gzip"},
    "small groups": {"row_group_size": 7, "write_statistics": False, "compression": "lz4"},
    "small dictionaries": {"dictionary_pagesize_limit": 2_000, "compression": "brotli"},
    "deltas": {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}},
}


@pytest.fixture(params=WRITINGS.values(), ids=WRITINGS.keys())
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(records()), path, **request.param)
    return path


def test_page_headers_tell_of_every_value(written: Path) -> None:
    footer = pq.read_metadata(written)
    with written.open("rb") as file:
        for group in range(footer.num_row_groups):
            for place in range(footer.num_columns):
                chunk = footer.row_group(group).column(place)
                size = chunk_size(file, chunk)
                assert size.values == chunk.num_values
                # a page that no codec makes smaller counts what it has in the file
                most = max(chunk.total_uncompressed_size, chunk.total_compressed_size)
                assert 0 < size.longest <= min(most, size.largest)
                assert 0 < size.compressed <= chunk.total_compressed_size
                assert chunk.total_uncompressed_size <= size.plain + 10**6
                assert (size.dictionary > 0) == chunk.has_dictionary_page
                if size.dictionary and chunk.physical_type == "BYTE_ARRAY":
                    longest = longest_in_dictionary(file, chunk, size)
                    assert 4 <= longest <= 600


@pytest.mark.parametrize(
    "limits", [{}, {"STEP_BYTES": 500, "LISTS_BYTES": 5_000}, {"_RECORDS_BYTES": 900}]
)
def test_bounds_change_no_value(
    written: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    monkeypatch.setattr(bounds, "MOST_TIMES", 10**6)
    for name, value in limits.items():
        monkeypatch.setattr(bounds, name, value)
    expected = records()
    others = ["number", "turns", "ids", "pair"]
    rows = rows_of(look(written, ["prompt"]), "prompt", others)
    assert [row.value for row in rows] == expected["prompt"]
    for name in others:
        assert [row.others[name] for row in rows] == expected[name]
    kept = kept_of(written, *expected)
    assert kept.to_pydict() == expected
    assert kept.schema.types == pa.table(expected).schema.types


def test_a_value_over_the_limit_is_an_error_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "LINE_BYTES", 1_000)
    monkeypatch.setattr(bounds, "_RECORDS_BYTES", 1_000)
    texts = ["a", "b" * 990, "c" * 1_001, "d", None]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": texts}), path)
    shards = look(path, ["prompt"])
    assert values_of(shards, "prompt") == ["a", "b" * 990, "bad_text", "d", None]
    [error] = [row.error for row in rows_of(shards, "prompt") if row.error]
    assert error.message.startswith("row 2 of `a.parquet`: column `prompt` has 1,0")
    assert error.message.endswith(" bytes, the limit is 1,000")


def test_a_page_over_the_limit_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "PAGE_BYTES", 5_000)
    monkeypatch.setattr(bounds, "MOST_TIMES", 10)
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": ["a", "b", "c" * 6_000], "other": ["d" * 9_000] * 3})
    pq.write_table(table, path, row_group_size=2)
    with pytest.raises(ConfigError) as raised:
        values_of(look(path, ["prompt"]), "prompt")
    assert re.fullmatch(
        rf"column `prompt` of row group 1 of `{path}` has a page of [0-9]+ bytes that unpacks to"
        r" 6,020, the limit is 10 times as many or 5,000",
        str(raised.value),
    )
    monkeypatch.setattr(bounds, "MOST_TIMES", 1_000)
    assert values_of(look(path, ["prompt"]), "prompt") == ["a", "b", "c" * 6_000]


def test_a_dictionary_of_very_many_short_texts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow holds a place and a length for each, beside the page."""
    monkeypatch.setattr(bounds, "PAGE_BYTES", 10_000)
    monkeypatch.setattr(bounds, "MOST_TIMES", 1)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": [f"{n:03}" for n in range(1_000)]}), path)
    with pytest.raises(ConfigError, match=r"that unpacks to 23,000, the limit is"):
        values_of(look(path, ["prompt"]), "prompt")


def test_a_damaged_page_header_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), path)
    content = bytearray(path.read_bytes())
    content[4:24] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(InfrastructureError, match="page header"):
        values_of(look(path, ["prompt"]), "prompt")
