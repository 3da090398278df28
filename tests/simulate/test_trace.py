"""Rows of a simulation: read from traces as they are found, or drawn."""

from pathlib import Path
from random import Random
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.errors import ConfigError
from jobrunner.simulate.trace import (
    TraceRow,
    draw_rows,
    parse_lengths,
    read_trace,
)


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_public_trace_is_understood_as_it_is(tmp_path):
    path = trace(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.2299600,3180,8\n",
    )
    first, second = read_trace(path, {})
    assert first == TraceRow(4808, 10, 0.0, 0)
    assert second[:2] == (3180, 8)
    assert second.arrival_s == pytest.approx(1.25)


def test_arrivals_may_be_seconds_and_count_from_the_first(tmp_path):
    path = trace(tmp_path, "Arrival,prompt_tokens,output_tokens\n7.5,3,1\n5,4,2\n")
    assert read_trace(path, {}) == [TraceRow(3, 1, 2.5), TraceRow(4, 2, 0.0)]


def test_columns_can_be_named(tmp_path):
    path = trace(tmp_path, "a,b,c,prompt_tokens\n3,5,1,9\n")
    columns = {"prompt": "a", "output": "b", "priority": "c", "arrival": None}
    assert read_trace(path, columns) == [TraceRow(3, 5, 0.0, 1)]


def test_records_without_tokens_are_left_out_with_a_warning(tmp_path, caplog):
    path = trace(tmp_path, "prompt_tokens,output_tokens\n3,0\n,4\n3,4\n")
    assert read_trace(path, {}) == [TraceRow(3, 4)]
    assert "2 rows" in caplog.text


def test_results_of_a_run_are_a_trace(tmp_path):
    rows = {"prompt_tokens": [3, 5, None], "output_tokens": [2, 9, None], "text": ["a", "b", None]}
    pq.write_table(pa.table(rows), tmp_path / "results.parquet")
    assert read_trace(tmp_path, {}) == [TraceRow(3, 2), TraceRow(5, 9)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,output_tokens\n1,2\n", "has no column for `trace.prompt`: x, output_tokens"),
        ("prompt_tokens,output_tokens\n1,two\n", "row 0 of the trace .* output is `two`"),
        ("prompt_tokens,output_tokens\n1,-2\n", "row 0 of the trace .* output is -2, least 0"),
        ("prompt_tokens,output_tokens\n1,2\n1\n", "row 1 of the trace .* has 1 fields"),
        ("time,prompt_tokens,output_tokens\nsoon,1,2\n", "arrival is `soon`"),
        ("time,prompt_tokens,output_tokens\n1e999,1,2\n", "arrival is `1e999`"),
        ("prompt_tokens,output_tokens\n", "has no rows"),
        ("", "has no column for `trace.prompt`"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(trace(tmp_path, text), {})


def test_a_column_that_is_not_there_is_said(tmp_path):
    path = trace(tmp_path, "prompt_tokens,output_tokens\n1,2\n")
    with pytest.raises(ConfigError, match="has no column `when`"):
        read_trace(path, {"arrival": "when"})


@pytest.mark.parametrize("name", ["nothing.csv", "nothing.parquet", "nothing"])
def test_a_missing_trace_is_said(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / name, {})


def test_a_damaged_trace_is_said(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "x.parquet", {})


def test_one_length_is_always_the_same():
    assert {parse_lengths("7")(Random(seed)) for seed in range(9)} == {7}


def test_a_range_reaches_both_its_ends():
    random, lengths = Random(1), parse_lengths("2..4")
    assert {lengths(random) for _ in range(99)} == {2, 3, 4}


def test_lognormal_lengths_have_the_median_and_the_p99_that_are_asked_for():
    random, lengths = Random(1), parse_lengths("lognormal:50,400")
    drawn = sorted(lengths(random) for _ in range(20_000))
    assert median(drawn) == pytest.approx(50, rel=0.05)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(400, rel=0.1)


def test_lognormal_lengths_stay_under_the_most():
    random, lengths = Random(1), parse_lengths("lognormal:50,400,100")
    assert max(lengths(random) for _ in range(999)) == 100


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "4..3", "0..3", "3..", "lognormal:5", "lognormal:9,5", "lognormal:5,9,4"],
)
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="must"):
        parse_lengths(text)


def test_the_first_rows_do_not_depend_on_how_many_are_drawn():
    lengths = parse_lengths("1..99")
    few, many = (draw_rows(count, lengths, lengths, 3) for count in (5, 50))
    assert many[:5] == few
    assert draw_rows(5, lengths, lengths, 4) != few
