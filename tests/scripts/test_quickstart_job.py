"""The quickstart job file and its data are what they say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pyarrow.parquet as pq

JOBS = Path(__file__).parents[2] / "jobs"
SHARDS = sorted((JOBS / "data" / "gsm8k").glob("*.parquet"))


def test_data_is_the_first_64_questions_in_two_shards() -> None:
    tables = [pq.read_table(shard) for shard in SHARDS]
    assert [table.column_names for table in tables] == [["id", "question", "answer"]] * 2
    ids = [row_id for table in tables for row_id in table["id"].to_pylist()]
    assert ids == [f"gsm8k-test-{row:04d}" for row in range(64)]
    assert all(table["question"].null_count == 0 for table in tables)


def test_data_carries_its_licence() -> None:
    notice = (JOBS / "data" / "gsm8k" / "NOTICE").read_text()
    assert "MIT License\n\nCopyright (c) 2021 OpenAI\n" in notice


def test_job_reads_the_data_and_writes_outside_the_jobs_folder() -> None:
    job = tomllib.loads((JOBS / "quickstart.toml").read_text())
    assert sorted(JOBS.glob(job["input"]["path"])) == SHARDS
    assert (JOBS / job["output"]["path"]).resolve() == JOBS.parent / "runs" / "quickstart"
    assert job["generation"]["max_new_tokens"] >= 128
