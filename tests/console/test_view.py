"""What is shown, whole, against golden files."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jobrunner.console.printable import printable, printable_lines
from jobrunner.console.snapshot import BandLatency, Snapshot, Totals
from jobrunner.console.stats import Stats
from jobrunner.console.view import plain_line, summary, view

RESULTS = Path("runs/gsm8k/results")


def rendered(snapshot: Snapshot, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(view(snapshot))
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def at_start() -> Snapshot:
    return Stats(
        Totals(20_000_000, shards=1000), slots=None, started_s=0.0, peak_memory=lambda: 0
    ).snapshot(0.0)


def test_view_in_the_middle_of_a_run(snapshot: Snapshot, golden: Callable[[str], str]) -> None:
    assert rendered(snapshot) == golden("view_middle.txt")


def test_view_before_anything_is_known(golden: Callable[[str], str]) -> None:
    assert rendered(at_start()) == golden("view_start.txt")


def test_view_of_large_numbers_fits_80_columns(
    snapshot: Snapshot, golden: Callable[[str], str]
) -> None:
    large = replace(
        snapshot,
        rows_total=20_000_000,
        rows_done=19_999_999,
        percent=99.999995,
        eta_s=100_000.0,
        elapsed_s=1e6,
        output_tokens_per_s=112_345.6,
        recent_output_tokens_per_s=112_345.6,
        total_tokens_per_s=1_123_456.7,
        rows_per_s=1234.5,
        running=1024,
        waiting=65_536,
        batch_size=1024,
        batch_size_mean=1000.04,
        errors=123_456,
        preemptions=12_345,
        shards_done=999,
        shards_total=1000,
    )
    assert rendered(large) == golden("view_large.txt")


def test_plain_line(snapshot: Snapshot, golden: Callable[[str], str]) -> None:
    assert plain_line(snapshot) + "\n" == golden("plain_line.txt")


def test_plain_line_before_anything_is_known(golden: Callable[[str], str]) -> None:
    assert plain_line(at_start()) + "\n" == golden("plain_line_start.txt")


def test_summary_of_a_stopped_run(snapshot: Snapshot, golden: Callable[[str], str]) -> None:
    assert summary(snapshot, RESULTS, python="python") + "\n" == golden("summary_stopped.txt")


def test_summary_of_a_finished_run(snapshot: Snapshot, golden: Callable[[str], str]) -> None:
    done = replace(snapshot, rows_done=2000, percent=100.0, shards_done=4, eta_s=0.0)
    assert summary(done, RESULTS, python="python") + "\n" == golden("summary_finished.txt")


def test_summary_before_any_shard_is_complete(golden: Callable[[str], str]) -> None:
    assert summary(at_start(), RESULTS, python="python") + "\n" == golden("summary_start.txt")


def test_summary_tells_the_cost_where_there_is_a_price(snapshot: Snapshot) -> None:
    priced = replace(snapshot, cost=1234.5, cost_per_million_tokens=0.4567, cost_per_row=2.65e-5)
    line = next(line for line in summary(priced, RESULTS).splitlines() if "cost" in line)
    assert line == "  cost     1,234.50, 0.457 per million tokens, 0.0000265 per row (this run)"


def test_cost_of_nothing_yet_is_told(snapshot: Snapshot) -> None:
    priced = replace(snapshot, cost=0.0, cost_per_million_tokens=None, cost_per_row=None)
    line = next(line for line in summary(priced, RESULTS).splitlines() if "cost" in line)
    assert line == "  cost     0.00, - per million tokens, - per row (this run)"


def test_summary_tells_rows_that_repeated_themselves(snapshot: Snapshot) -> None:
    repeated = replace(snapshot, repetition_rows=7)
    line = next(line for line in summary(repeated, RESULTS).splitlines() if "ended" in line)
    assert line == "  ended    225 by stop (90%), 24 cut by length, 7 by repetition (this run)"


def test_summary_tells_how_many_answers_are_those_of_equal_rows(snapshot: Snapshot) -> None:
    lines = summary(replace(snapshot, duplicates=1200), RESULTS).splitlines()
    assert "  equal    1,200 answers are those of equal rows (this run)" in lines


def test_error_examples_are_shown_as_text_on_one_line_each(snapshot: Snapshot) -> None:
    hostile = replace(
        snapshot,
        errors_by_kind={"bad_text": 9, "null_prompt": 1},
        error_examples={"bad_text": ("row 1\x1b[2J\nfinished: forged", "b"), "null_prompt": ("c",)},
    )
    lines = summary(hostile, RESULTS).splitlines()
    assert lines[3:6] == [
        "    bad_text: row 1\ufffd[2J\ufffdfinished: forged",
        "    bad_text: b",
        "    null_prompt: c",
    ]


def test_command_of_the_summary_prints_the_first_rows(snapshot: Snapshot, tmp_path: Path) -> None:
    results = tmp_path / "it's a run" / "results"
    results.mkdir(parents=True)
    pq.write_table(pa.table({"row": [0, 1, 2, 3], "text": list("abcd")}), results / "a.parquet")
    look = next(line for line in summary(snapshot, results).splitlines() if "look" in line)
    command = look.removeprefix("  look").strip()
    printed = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    assert printed.stdout == (
        "{'row': 0, 'text': 'a'}\n{'row': 1, 'text': 'b'}\n{'row': 2, 'text': 'c'}\n"
    )


@pytest.mark.parametrize("show", [rendered, plain_line])
def test_hostile_shard_name_is_shown_as_text(
    snapshot: Snapshot, show: Callable[[Snapshot], str]
) -> None:
    named = replace(snapshot, shard="[red]a[/red]\x1b[2J\r\n:boom:\u202e\udcff.parquet")
    last = show(named).splitlines()[-1]
    assert last.endswith("shard [red]a[/red]\ufffd[2J\ufffd\ufffd:boom:\ufffd\ufffd.parquet")


def test_long_shard_name_keeps_its_end(snapshot: Snapshot) -> None:
    lines = rendered(replace(snapshot, shard="深い/" * 40 + "part-7.parquet")).splitlines()
    assert len(lines) == 6
    assert lines[-1].startswith("shard …")
    assert lines[-1].endswith("part-7.parquet")


def test_percent_is_rounded_down_so_that_100_means_all(snapshot: Snapshot) -> None:
    assert plain_line(replace(snapshot, percent=99.99)).startswith("99.9% ")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0, "0s"),
        (59.6, "1m00s"),
        (3599.0, "59m59s"),
        (3600.0, "1h00m"),
        (90_000.0, "1d01h"),
    ],
)
def test_duration_is_short(snapshot: Snapshot, seconds: float | None, shown: str) -> None:
    assert f"ETA {shown}," in plain_line(replace(snapshot, eta_s=seconds))


def test_clean_keeps_printable_text_and_replaces_the_rest() -> None:
    assert printable("né 日本 😀 a\tb\x07\x9b") == "né 日本 😀 a\ufffdb\ufffd\ufffd"


def test_later_lines_are_indented() -> None:
    assert printable_lines("row 1 is bad\nwarning: forged") == "row 1 is bad\n  warning: forged"


def test_stats_do_not_import_rich() -> None:
    code = "import sys, jobrunner.console.stats; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_summary_tells_the_latencies_of_priorities(snapshot: Snapshot) -> None:
    bands = (BandLatency(0, 9, 0.5, 1.25, 2.0), BandLatency(5, 9, 10.0, 123.4, None))
    said = summary(replace(snapshot, latency_by_priority=bands), RESULTS).splitlines()
    assert [line for line in said if "latency" in line] == [
        "  latency  priority 0: p50 0.5 s, p95 1.25 s, p99 2 s (this run)",
        "  latency  priority 5: p50 10 s, p95 123 s, p99 - s (this run)",
    ]


def test_a_lack_of_memory_is_shown_with_what_it_left(snapshot: Snapshot) -> None:
    said = "out of memory 2 times: now at most 250 tokens and 30 rows a step"
    short = replace(snapshot, out_of_memory=2, token_budget=250, max_batch_size=30)
    assert f", {said}, " in plain_line(short)
    assert said in rendered(short).splitlines()
    assert "out of memory" not in plain_line(snapshot) + rendered(snapshot)
