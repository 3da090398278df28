"""Result files of each format hold the same rows, open in every tool, and keep their sums."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.config import Settings
from jobrunner.data.layout import EXTRA_FIELDS, RunDirectory, outcome_schema, result_name
from jobrunner.data.results.merge import merge_shard
from jobrunner.data.results.outcomes import outcome_table
from jobrunner.data.results.parts import FOOTER_KEY, Tally, write_part
from jobrunner.data.results.result_files import read_outcomes, read_result_tally, result_suffix
from jobrunner.data.results.samples import FinishedRow
from jobrunner.errors import InfrastructureError
from jobrunner.records import RowId
from tests.data.conftest import answer, failure, kept_columns
from tests.data.test_outcomes import sample

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
ALL = tuple(EXTRA_FIELDS)
SHARD = "a/b.parquet"


@pytest.fixture(params=SUFFIXES)
def any_run(request, run):
    """A run directory of each format."""
    return replace(run, suffix=request.param)


@pytest.fixture
def json_run(run):
    return replace(run, suffix=".jsonl")


def rich(shard, index):
    """An ok row with two samples and all that can be asked for."""
    return FinishedRow(tuple(sample(n, row=RowId(shard, index)) for n in range(2)))


def finish(run, shard, rows, **options):
    """Make the result file of a shard out of its finished rows."""
    extras = options.pop("extras", ALL)
    if rows:
        write_part(run, shard, [outcome_table(rows, extras)])
    kept, schema = options.pop("kept", kept_columns(len(rows)))
    return merge_shard(run, shard, len(rows), kept, schema, extras=extras, **options)


def test_every_format_gives_the_outcomes_back(any_run):
    rows = [rich(SHARD, 0), failure(SHARD, 1), rich(SHARD, 2)]
    tally = finish(any_run, SHARD, rows)
    schema = outcome_schema(ALL)
    [table] = read_outcomes(any_run, SHARD, schema)
    assert table.equals(outcome_table(rows, ALL))
    assert tally == read_result_tally(any_run, SHARD)
    assert (tally.rows, tally.output_tokens, tally.errors) == (3, 8, {"null_prompt": 1})
    assert not any_run.parts(SHARD).exists()


def test_every_format_has_a_file_for_a_shard_without_rows(any_run):
    assert finish(any_run, SHARD, []) == Tally()
    assert list(read_outcomes(any_run, SHARD, outcome_schema(ALL))) == []
    assert read_result_tally(any_run, SHARD) == Tally()


def test_json_lines_are_strict_with_keys_in_the_schemas_order(json_run):
    kept = pa.table({"score": [math.nan, 1.5], "raw": [b"\x00\xff", None]})
    rows = [rich(SHARD, 0), answer(SHARD, 1, 'quote " line\nend \u2028 é')]
    options = {"extras": ("logprobs",), "kept": (lambda: iter(kept.to_batches()), kept.schema)}
    finish(json_run, SHARD, rows, **options)
    lines = json_run.result(SHARD).read_text(encoding="utf-8").split("\n")
    first, second, empty = lines
    assert empty == ""
    names = ["score", "raw", *outcome_schema(("logprobs",)).names]
    assert list(json.loads(first)) == names
    assert json.loads(first)["score"] is None
    assert json.loads(first)["raw"] == "AP8="
    assert json.loads(first)["logprobs"][0]["top"][1] == {"token_id": 9, "logprob": None}
    assert json.loads(second)["text"] == 'quote " line\nend \u2028 é'
    assert "\u2028 é" in second


@pytest.mark.parametrize(
    ("shard", "name"),
    [
        ("a.parquet", "a.jsonl"),
        ("b/c.jsonl.gz", "b/c.jsonl"),
        ("d.csv", "d.jsonl"),
        ("train", "train.jsonl"),
        ("v1.0/x.json.zst", "v1.0/x.jsonl"),
        ("notes.v2", "notes.v2.jsonl"),
        ("dir.json/x", "dir.json/x.jsonl"),
        ("a.jsonl.parquet", "a.jsonl.jsonl"),
    ],
)
def test_a_result_is_named_after_its_shard_without_the_suffix_of_an_input(shard, name):
    assert result_name(shard, ".jsonl") == name
    result = RunDirectory(Path("run"), "w", ".jsonl").result(shard)
    assert result == Path("run/results", name)


@pytest.mark.parametrize(
    ("output", "suffix"),
    [
        ({}, ".parquet"),
        ({"format": "parquet", "compression": "gzip"}, ".parquet"),
        ({"format": "jsonl"}, ".jsonl"),
        ({"format": "jsonl", "compression": "none"}, ".jsonl"),
        ({"format": "jsonl", "compression": "gzip"}, ".jsonl.gz"),
        ({"format": "jsonl", "compression": "zstd"}, ".jsonl.zst"),
    ],
)
def test_json_lines_are_compressed_only_where_that_is_asked_for(output, suffix):
    tables = {"input": {"path": "input", "prompt": "prompt"}, "model": {"name": "demo"}}
    settings = Settings.model_validate({**tables, "output": {"path": "run", **output}})
    assert result_suffix(settings) == suffix


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "none"])
def test_parquet_is_compressed_as_asked(run, compression):
    finish(run, SHARD, [answer(SHARD, 0)], extras=(), compression=compression)
    column = pq.read_metadata(run.result(SHARD)).row_group(0).column(0)
    assert column.compression == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


def test_a_compressed_json_file_is_what_other_programs_read(run):
    run = replace(run, suffix=".jsonl.gz")
    finish(run, SHARD, [answer(SHARD, 0)])
    with gzip.open(run.result(SHARD), "rt") as file:
        assert json.loads(file.read())["text"] == "answer 0"


def test_provenance_is_in_the_footer_of_a_parquet_file_and_beside_json_lines(run, json_run):
    for directory in (run, json_run):
        finish(directory, SHARD, [answer(SHARD, 0)], provenance={"model": "tiny"})
    footer = json.loads(pq.read_metadata(run.result(SHARD)).metadata[FOOTER_KEY])
    beside = json.loads(json_run.tally(SHARD).read_text())
    assert footer["model"] == beside["model"] == "tiny"
    assert footer["tally"] == beside["tally"]


def test_the_same_rows_make_the_same_bytes(any_run):
    made = []
    for _ in range(2):
        finish(any_run, SHARD, [rich(SHARD, 0), failure(SHARD, 1)], provenance={"model": "tiny"})
        made.append(any_run.result(SHARD).read_bytes())
        any_run.result(SHARD).unlink()
    assert made[0] == made[1]


@pytest.mark.parametrize("damage", ["gone", "empty", "of another file", "no object"])
def test_sums_of_json_lines_that_are_lost_are_added_up_again(json_run, damage):
    tally = finish(json_run, SHARD, [rich(SHARD, 0), failure(SHARD, 1)])
    beside = json_run.tally(SHARD)
    if damage == "gone":
        beside.unlink()
    elif damage == "of another file":
        said = json.loads(beside.read_text())
        said["result"]["modified_ns"] -= 1
        said["tally"]["rows"] = 99
        beside.write_text(json.dumps(said))
    else:
        beside.write_text("" if damage == "empty" else "[]")
    assert read_result_tally(json_run, SHARD) == tally


@pytest.mark.parametrize("damage", [b'{"row": 0', b"[1]\n", b"\xff\n", b'{"x": 1}\n'])
def test_damaged_json_lines_are_named_with_what_to_do(json_run, damage):
    finish(json_run, SHARD, [answer(SHARD, 0)])
    json_run.result(SHARD).write_bytes(damage)
    with pytest.raises(InfrastructureError, match="damaged") as raised:
        list(read_outcomes(json_run, SHARD, outcome_schema()))
    assert "remove this file" in raised.value.hint


def test_a_kept_column_may_be_called_like_a_part_of_an_outcome(run):
    kept = pa.table({"row.x": [7, 8]})
    rows = [answer(SHARD, 0), answer(SHARD, 1)]
    finish(run, SHARD, rows, kept=(lambda: iter(kept.to_batches()), kept.schema))
    [table] = read_outcomes(run, SHARD, outcome_schema())
    assert table["row"].to_pylist() == [0, 1]


def test_many_windows_make_one_file(any_run, monkeypatch):
    monkeypatch.setattr("jobrunner.data.results.outcomes.HEAVY_WINDOW_ROWS", 4)
    finish(any_run, SHARD, [rich(SHARD, index) for index in range(11)])
    tables = list(read_outcomes(any_run, SHARD, outcome_schema(ALL)))
    assert [len(table) for table in tables] == [4, 4, 3]
    assert pa.concat_tables(tables)["row"].to_pylist() == list(range(11))
