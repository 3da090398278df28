"""A run at a fixed moment, and the golden files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobrunner.console.snapshot import Snapshot, Totals
from jobrunner.console.stats import Stats
from jobrunner.records import Completion, RowError, RowId, Step

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden() -> Callable[[str], str]:
    return lambda name: (GOLDEN / name).read_text(encoding="utf-8")


@pytest.fixture
def stats() -> Stats:
    """Half of 2,000 rows done by earlier runs, 250 more by this one in 200 seconds."""
    totals = Totals(2000, rows_done_before=1000, errors_before=2, shards=4, shards_done_before=1)
    stats = Stats(totals, slots=64, started_s=0.0, peak_memory=lambda: 3 << 30)
    stats.shard_started("train/part-00002.parquet")
    null = RowId("train/part-00002.parquet", 7)
    stats.row_failed(RowError("null_prompt", f"row 7 of `{null.shard}` is null"), null)
    step = Step(
        prefill_tokens=100,
        decode_tokens=50,
        output_tokens=60,
        tokens_computed=150,
        batch_size=60,
        running=62,
        waiting=128,
        kv_blocks_used=73,
        kv_blocks=100,
        forward_s=0.6,
        step_s=0.8,
    )
    for second in range(1, 250):
        reason = "length" if second % 10 == 0 else "stop"
        row = Completion(
            RowId("a", second),
            tokens=[5] * 48,
            finish_reason=reason,
            prompt_tokens=80,
            queue_s=2.0,
            prefill_s=0.5,
            decode_s=30.0,
            longest_gap_s=1.5,
        )
        stats.observe(replace(step, completions=[row]), second * 0.8)
    stats.observe(replace(step, kv_blocks_used=61, preemptions=3), 200.0)
    return stats


@pytest.fixture
def snapshot(stats: Stats) -> Snapshot:
    return stats.snapshot(200.0)
