"""Parquet as other tools write it: their types are read, kept and asked for as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.reading import kept_of, look, rows_of, values_of

TURNS = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ü 😀"}], []]


def check(path: Path) -> None:
    """A file with a text, an integer, a double, messages and a null in each is read whole."""
    shards = look(path, ["prompt", "turns"], ["id", "score", "turns", "prompt"])
    rows = rows_of(shards, "prompt", ["turns"])
    assert [row.value for row in rows] == ["a", None, "c\0"]
    assert [row.others["turns"] for row in rows] == TURNS
    table = kept_of(path, "id", "score", "turns", "prompt")
    assert table.select(["id", "score", "prompt"]).to_pylist() == [
        {"id": 1, "score": 0.5, "prompt": "a"},
        {"id": 2, "score": None, "prompt": None},
        {"id": 3, "score": 1.5, "prompt": "c\0"},
    ]
    assert table["turns"].to_pylist() == TURNS


RECORDS = {
    "id": [1, 2, 3],
    "score": [0.5, None, 1.5],
    "prompt": ["a", None, "c\0"],
    "turns": TURNS,
}


def test_pandas_with_an_index_and_categories(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(RECORDS, index=["x", "y", "z"]).sort_index(ascending=True)
    frame.to_parquet(tmp_path / "a.parquet")
    check(tmp_path / "a.parquet")
    index = kept_of(tmp_path / "a.parquet", "__index_level_0__")
    assert index.to_pydict() == {"__index_level_0__": ["x", "y", "z"]}
    frame["prompt"] = frame["prompt"].astype("category")
    frame.to_parquet(tmp_path / "a.parquet")
    check(tmp_path / "a.parquet")


def test_polars(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    polars.DataFrame(RECORDS).write_parquet(tmp_path / "a.parquet")
    check(tmp_path / "a.parquet")
    frame = polars.DataFrame(RECORDS).with_columns(polars.col("prompt").cast(polars.Categorical))
    frame.write_parquet(tmp_path / "a.parquet")
    check(tmp_path / "a.parquet")


def test_polars_hive_folders(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"year": [2023, 2024, 2024], "prompt": ["a", "b", "c"]})
    frame.write_parquet(tmp_path / "in", partition_by="year", mkdir=True)
    assert kept_of(tmp_path / "in", "year", "prompt").to_pylist() == frame.to_dicts()


def test_duckdb(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    table = pa.table(RECORDS)
    database = duckdb.connect()
    database.register("records", table)
    database.sql(f"COPY (SELECT * FROM records ORDER BY id) TO '{tmp_path}/a.parquet'")
    check(tmp_path / "a.parquet")


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(RECORDS).to_parquet(str(tmp_path / "a.parquet"))
    check(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "options",
    [
        # as Spark writes it: old names of list items, snappy, no Arrow schema
        {"use_compliant_nested_type": False, "store_schema": False, "compression": "snappy"},
        {"version": "1.0", "data_page_version": "2.0"},
        {"use_dictionary": False, "write_statistics": False, "compression": "gzip"},
        {"use_byte_stream_split": ["score"], "use_dictionary": ["prompt"], "compression": "lz4"},
    ],
)
def test_other_encodings(tmp_path: Path, options: dict[str, Any]) -> None:
    pq.write_table(pa.table(RECORDS), tmp_path / "a.parquet", **options)
    check(tmp_path / "a.parquet")


@pytest.mark.parametrize("text", [pa.large_string(), pa.string_view()], ids=str)
def test_case_W_other_kinds_of_text(tmp_path: Path, text: pa.DataType) -> None:
    table = pa.table({**RECORDS, "prompt": pa.array(RECORDS["prompt"], text)})
    pq.write_table(table, tmp_path / "a.parquet")
    check(tmp_path / "a.parquet")


def test_extension_types_are_kept(tmp_path: Path) -> None:
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16)))
    table = pa.table({"prompt": ["p"], "key": uuids})
    pq.write_table(table, tmp_path / "a.parquet")
    assert kept_of(tmp_path / "a.parquet", "key").equals(table.select(["key"]))
    assert values_of(look(tmp_path / "a.parquet", ["prompt"]), "prompt") == ["p"]
