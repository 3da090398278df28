"""Results open in the tools that people use, as they are: several shards, one of errors only."""

from dataclasses import replace

import pytest

from jobrunner.data.layout import EXTRA_FIELDS, outcome_schema
from tests.data.conftest import failure, kept_columns
from tests.data.test_result_files import finish, rich

ROWS = {"a.parquet": 3, "b/errors.parquet": 2, "c.parquet": 0}
TEXTS = ["text 0"] * 3 + [None] * 2


def finish_job(run):
    """A shard of answers with everything in them, one with only errors, one without rows."""
    finish(run, "a.parquet", [rich("a.parquet", index) for index in range(3)])
    finish(run, "b/errors.parquet", [failure("b/errors.parquet", index) for index in range(2)])
    finish(run, "c.parquet", [])
    return run


@pytest.fixture
def parquet(run):
    return finish_job(run)


@pytest.fixture
def lines(run):
    return finish_job(replace(run, suffix=".jsonl"))


def check(rows):
    """Whatever tool has read them: all rows, with the nested columns whole."""
    assert [row["text"] for row in rows] == TEXTS
    assert [row["error_kind"] for row in rows] == [None] * 3 + ["null_prompt"] * 2
    assert [list(row["token_ids"]) for row in rows[:3]] == [[5, 6]] * 3
    assert [sample["text"] for sample in rows[0]["samples"]] == ["text 0", "text 1"]
    top = [entry["logprob"] for entry in rows[0]["logprobs"][1]["top"]]
    assert top == [-0.5, None]


def test_pandas_opens_a_folder_of_parquet(parquet):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(parquet.results)
    frame = frame.astype(object).where(frame.notna(), None)
    check(frame.sort_values(["status", "row"], ascending=[False, True]).to_dict("records"))


def test_polars_opens_a_folder_of_parquet(parquet):
    polars = pytest.importorskip("polars")
    check(polars.read_parquet(parquet.results / "**/*.parquet").rows(named=True))


def test_duckdb_opens_a_folder_of_parquet(parquet):
    duckdb = pytest.importorskip("duckdb")
    check(rows_of(duckdb.sql(f"SELECT * FROM '{parquet.results}/**/*.parquet' ORDER BY ALL")))


def test_datasets_opens_a_folder_of_parquet(parquet, tmp_path):
    datasets = pytest.importorskip("datasets")
    opened = datasets.load_dataset(
        "parquet", data_dir=str(parquet.results), split="train", cache_dir=str(tmp_path / "cache")
    )
    check(list(opened))


def test_pandas_opens_json_lines(lines):
    pandas = pytest.importorskip("pandas")
    frames = [pandas.read_json(lines.result(shard), lines=True) for shard in ROWS]
    assert [len(frame) for frame in frames] == list(ROWS.values())
    records = [row for frame in frames for row in frame.astype(object).to_dict("records")]
    check([{k: None if v != v else v for k, v in row.items()} for row in records])


def test_polars_opens_json_lines_with_the_schema_of_results(lines):
    polars = pytest.importorskip("polars")
    schema = polars.from_arrow(whole_schema().empty_table()).schema
    opened = polars.scan_ndjson(lines.results / "**/*.jsonl", schema=schema).collect()
    check(opened.rows(named=True))


def test_duckdb_opens_a_folder_of_json_lines(lines):
    duckdb = pytest.importorskip("duckdb")
    check(rows_of(duckdb.sql(f"SELECT * FROM '{lines.results}/**/*.jsonl' ORDER BY ALL")))


def test_datasets_opens_a_folder_of_json_lines_with_the_schema_of_results(lines, tmp_path):
    datasets = pytest.importorskip("datasets")
    opened = datasets.load_dataset(
        "json",
        data_dir=str(lines.results),
        split="train",
        features=datasets.Features.from_arrow_schema(whole_schema()),
        cache_dir=str(tmp_path / "cache"),
    )
    check(list(opened))


def whole_schema():
    """What JSON lines cannot say: the types of columns that are null in a whole file."""
    schema = outcome_schema(EXTRA_FIELDS)
    for field in reversed(kept_columns(0)[1]):
        schema = schema.insert(0, field)
    return schema


def rows_of(relation):
    rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
    return sorted(rows, key=lambda row: (row["status"] == "error", row["row"]))
