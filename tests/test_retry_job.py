"""`retry_errors` of a whole job: error rows stay until they are asked for, then run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobrunner.errors import ExitCode
from jobrunner.job import Summary, run
from jobrunner.opening import Job
from jobrunner.records import Engine, RowId, Step
from tests.world import World, fake_engine

# with ten blocks of KV memory the long one cannot fit
PROMPTS = ["short", "long " * 40, "short too", None]
LONG = RowId("a.parquet", 1)


@pytest.fixture
def world(tmp_path: Path, tiny_model: Path) -> World:
    """A finished job of two rows that are answered and two that are errors."""
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", PROMPTS)
    world.add_shard("b.parquet", ["another"])
    assert world.run(blocks=10).exit_code == ExitCode.ROW_ERRORS
    assert kinds(world) == [None, "cannot_fit", None, "null_prompt"]
    return world


def kinds(world: World) -> list[str | None]:
    return [row["error_kind"] for row in world.results()["a.parquet"]]


def no_engine(job: Job) -> Engine:
    raise AssertionError("the model was loaded")


def retry(world: World, blocks: int) -> tuple[Summary, list[RowId]]:
    """Run the error rows again; return how it ended and which rows the engine answered."""
    answered: list[RowId] = []

    def observe(step: Step) -> None:
        answered.extend(completion.id for completion in step.completions)

    options: dict[str, Any] = {"open_engine": fake_engine(blocks=blocks), "observe": observe}
    return run(world.settings(), retry_errors=True, **options), answered


def test_case_D_a_failed_row_is_resumed_twice_without_a_call_of_the_model(world: World) -> None:
    before = world.results()
    for _ in range(2):
        summary = run(world.settings(), open_engine=no_engine)
        assert summary.exit_code == ExitCode.ROW_ERRORS
        assert summary.tally.errors == {"cannot_fit": 1, "null_prompt": 1}
    assert world.results() == before


def test_case_D_asked_for_exactly_the_failed_rows_run_again(world: World) -> None:
    before = world.results()
    summary, answered = retry(world, blocks=64)
    assert answered == [LONG]
    assert summary.exit_code == ExitCode.ROW_ERRORS
    assert summary.tally.errors == {"null_prompt": 1}
    after = world.results()
    assert after["a.parquet"][1]["status"] == "ok"
    before["a.parquet"][1] = after["a.parquet"][1]
    assert after == before
    assert world.problems() == []
    assert world.leftovers() == []


def test_case_D_a_row_that_fails_again_stays_its_error(world: World) -> None:
    before = world.results()
    summary, answered = retry(world, blocks=10)
    assert (summary.exit_code, answered) == (ExitCode.ROW_ERRORS, [LONG])
    assert world.results() == before
    assert world.problems() == []


def test_case_D_without_errors_nothing_runs_again(world: World) -> None:
    world.add_shard("a.parquet", ["short"])
    summary = run(world.settings('output.path="other"'), open_engine=fake_engine())
    assert summary.exit_code == ExitCode.OK
    again = world.settings('output.path="other"')
    assert run(again, retry_errors=True, open_engine=no_engine).exit_code == ExitCode.OK
