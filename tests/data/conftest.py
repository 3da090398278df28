"""Run directories and small inputs for the tests of data."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.data.layout import RunDirectory
from jobrunner.data.results.samples import Answer, FinishedRow
from jobrunner.records import Completion, RowError, RowId


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run", worker="host-1-aa")
    directory.create()
    return directory


@pytest.fixture
def other_run(run):
    """The same run directory as another worker sees it."""
    return RunDirectory(run.root, worker="host-2-bb")


def answer(shard: str, index: int, text: str = "") -> FinishedRow:
    """A finished row whose text names it."""
    completion = Completion(
        RowId(shard, index), tokens=[1, 2], finish_reason="stop", prompt_tokens=3
    )
    return FinishedRow((Answer(completion, text or f"answer {index}"),))


def failure(shard: str, index: int) -> FinishedRow:
    """A row that ended in an error."""
    completion = Completion(RowId(shard, index), error=RowError("null_prompt", "it is null"))
    return FinishedRow((Answer(completion, None),))


def kept_columns(rows: int):
    """What the input carries: a function that streams it, and its schema."""
    ids = pa.array([f"id-{index}" for index in range(rows)], pa.string())
    table = pa.table({"id": ids})
    return lambda: iter(table.to_batches(max_chunksize=7)), table.schema


def read_result(run, shard: str) -> list[dict]:
    return pq.read_table(run.result(shard)).to_pylist()
