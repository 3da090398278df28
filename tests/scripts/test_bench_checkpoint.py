"""The bench of checkpoints and restarts, small: it runs, and what it wrote is what it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts/bench_checkpoint"


def bench(*words: str | Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_restart_finds_all_rows_and_tells_the_seconds_of_each_phase(tmp_path: Path) -> None:
    [found] = bench("restart", tmp_path, "--rows", "2000", "--parts", "20", "--shards", "2")
    assert (found["rows_done"], found["parts"]) == (2000, 20)
    assert {"imports", "open_job", "clean_up", "Progress", "announce"} < set(found["phases_s"])
    parts = sum(found["phases_s"][name] for name in ("imports", "clean_up", "Progress"))
    assert 0 < parts <= found["first_step_s"]
    assert found["disk_bytes_per_row"] > 10


def test_the_time_inside_checkpoints_is_that_of_the_calls_on_the_clock(tmp_path: Path) -> None:
    often, never = bench("calls", tmp_path, "--every", "100ms", "1h", "--seconds", "1.5")
    assert (often["every"], never["every"]) == ("100ms", "1h")
    assert often["calls"] > never["calls"] == 0
    assert 0 < often["longest_s"] <= often["inside_s"] < often["wall_s"]
    assert never["share"] == 0.0 < never["last_s"]
