"""Rows of forced lengths: skewed outputs, or a mix of prompts, the same for the same seed."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "skewed_rows"


def write(path, *options):
    """Run the script; return what it says and its rows."""
    command = [sys.executable, str(SCRIPT), str(path), *options]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(said), pq.read_table(path).to_pylist()


def test_outputs_are_skewed_forced_and_the_same_for_the_same_seed(tmp_path):
    said, rows = write(tmp_path / "a.parquet")
    lengths = [row["params"]["max_new_tokens"] for row in rows]
    assert len(rows) == said["rows"] == 96
    assert said["output_tokens"] == sum(lengths)
    assert said["p99_over_p50"] >= 8
    assert max(lengths) <= 256
    assert min(lengths) >= 1
    assert all(row["params"]["ignore_eos"] for row in rows)
    assert write(tmp_path / "b.parquet")[1] == rows
    assert write(tmp_path / "c.parquet", "--seed", "1")[1] != rows


def test_numbered_prompts_all_begin_differently(tmp_path):
    _, rows = write(tmp_path / "a.parquet", "--rows", "100")
    _, numbered = write(tmp_path / "b.parquet", "--rows", "100", "--numbered")
    assert len({row["question"] for row in rows}) < 100
    assert [row["question"] for row in numbered] == [
        f"{place}. {row['question']}" for place, row in enumerate(rows)
    ]


def test_prompts_are_mixed_from_short_to_long(tmp_path):
    _, rows = write(tmp_path / "a.parquet", "--mix", "--rows", "20")
    characters = sorted(len(row["question"]) for row in rows)
    assert 80 <= characters[0] <= 30 * 4.2
    assert 6000 <= characters[-1] <= 1500 * 4.2
    assert characters[10] < 1500
    assert all(16 <= row["params"]["max_new_tokens"] <= 64 for row in rows)
