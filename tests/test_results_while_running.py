"""What is finished is committed and can be read while the rest of the job still runs."""

import pyarrow as pa
import pytest

from jobrunner.data.progress import Progress
from jobrunner.data.results.merge import merge_windows, part_cursors
from jobrunner.data.results.parts import list_parts
from jobrunner.errors import ExitCode
from tests import world as module
from tests.world import World

LONG, SHORT, LONG_TOKENS, SHORT_TOKENS = "long", "short", 2000, 20
SETTING = f"generation.max_new_tokens={LONG_TOKENS}"


@pytest.fixture
def world(tmp_path, tiny_model, monkeypatch):
    """One row of 2,000 new tokens among 200 of 20: the length of a prompt decides."""
    world = World(tmp_path, tiny_model)
    prompts = [f"{SHORT * 10} {index}" for index in range(200)]
    world.add_shard("a.parquet", [*prompts[:100], LONG, *prompts[100:]])
    monkeypatch.setattr(
        module,
        "output_length",
        lambda prompt: LONG_TOKENS if len(prompt) < len(SHORT * 10) else SHORT_TOKENS,
    )
    return world


@pytest.fixture
def finished():
    """Count, step by step, the rows that have ended."""
    total = 0

    def count(step):
        nonlocal total
        total += len(step.completions)
        # the parts of the last of them are written after the step that ends them
        return total if not step.completions else 0

    return count


def test_case_X_short_rows_are_committed_while_a_long_one_runs(world, finished):
    known = []

    def look(step):
        if finished(step) == 200 and not known:
            known.append(Progress(world.directory, {"a.parquet": 201})["a.parquet"].done)

    summary = world.run(SETTING, observe=look, blocks=512)
    assert summary.exit_code == ExitCode.OK
    [rows] = world.results().values()
    assert [row["output_tokens"] for row in rows].count(SHORT_TOKENS) == 200
    assert rows[100]["output_tokens"] == LONG_TOKENS
    # all that filled a part; a part has ten rows here
    assert len(known[0]) >= 190
    assert 100 not in known[0]


def test_committed_rows_are_read_once_each_from_the_parts_of_a_running_job(world, finished):
    found = []

    def read(step):
        if finished(step) == 200 and not found:
            parts = list_parts(world.directory, "a.parquet")
            found.append(pa.concat_tables(merge_windows(part_cursors(parts))))

    world.run(SETTING, observe=read, blocks=512)
    rows = found[0]["row"].to_pylist()
    assert rows == sorted(set(rows))
    assert set(found[0]["output_tokens"].to_pylist()) == {SHORT_TOKENS}


def test_case_W_a_shard_with_only_errors_is_finished_while_others_run(world):
    world.add_shard("errors.parquet", [None, "", None])
    merged = []

    def look(step):
        if not any(merged):
            merged.append(Progress(world.directory, {"errors.parquet": 3}).complete)

    summary = world.run(SETTING, observe=look, blocks=512)
    assert summary.exit_code == ExitCode.ROW_ERRORS
    assert [row["status"] for row in world.results()["errors.parquet"]] == ["error"] * 3
    assert merged[-1]
    assert world.problems(SETTING) == []
