"""Jobs that ask for several samples of a row: each once, whatever happens."""

import json
import os
import signal
from dataclasses import replace

import pytest

from jobrunner.errors import ExitCode
from tests.world import World, kill

THREE = ("generation.n=3", 'output.columns=["token_ids"]')


@pytest.fixture
def world(tmp_path, tiny_model):
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", [f"{index} " + "x" * (7 * index % 50) for index in range(9)])
    world.add_shard("errors.parquet", [None, ""])
    return world


@pytest.fixture
def reference(tmp_path_factory, tiny_model, world):
    """The results of the same job when nobody disturbs it, and its tokens."""
    undisturbed = World(tmp_path_factory.mktemp("reference"), tiny_model)
    (world.folder / "input").rename(undisturbed.folder / "input")
    (world.folder / "input").symlink_to(undisturbed.folder / "input")
    assert undisturbed.run(*THREE).exit_code == ExitCode.ROW_ERRORS
    return undisturbed.results(), undisturbed.tokens_generated


def test_a_row_with_three_samples_is_one_row_with_their_list(world, reference):
    rows = reference[0]["a.parquet"]
    assert [len(row["samples"]) for row in rows] == [3] * 9
    for row in rows:
        assert row["text"] == row["samples"][0]["text"]
        assert row["output_tokens"] == sum(len(sample["token_ids"]) for sample in row["samples"])
    assert [row["samples"] for row in reference[0]["errors.parquet"]] == [None, None]


def test_case_E_stopped_every_few_steps_no_sample_is_generated_twice(world, reference):
    for _ in range(100):
        if world.run_and_stop(5, *THREE).exit_code == ExitCode.ROW_ERRORS:
            break
    assert world.results() == reference[0]
    assert world.tokens_generated == reference[1]
    assert world.problems(*THREE) == []
    assert world.leftovers() == []


@pytest.mark.parametrize("steps", [5, 20])
def test_case_A_killed_inside_a_step_every_sample_is_there_once(world, reference, steps):
    seen = 0

    def die():
        nonlocal seen
        seen += 1
        if seen == steps:
            kill()

    doomed = world.start_worker("doomed", *THREE, before_step=die)
    assert os.waitstatus_to_exitcode(os.waitpid(doomed, 0)[1]) == -signal.SIGKILL
    assert world.run(*THREE).exit_code == ExitCode.ROW_ERRORS
    assert world.results() == reference[0]


def test_json_lines_hold_the_same_rows_as_parquet(world, reference):
    world.run(*THREE, 'output.format="jsonl"')
    run = replace(world.directory, suffix=".jsonl")
    for shard, rows in reference[0].items():
        lines = run.result(shard).read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows
