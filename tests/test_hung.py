"""Whole commands whose step never ends: out in time with exit code 74, and nothing is lost."""

import json
import os
import re
import subprocess
import time

import pytest

from jobrunner.errors import ExitCode
from tests.fake_cbjob import COMMAND
from tests.world import World

ROWS, KILLER = 60, 33


@pytest.fixture
def world(tmp_path, tiny_model):
    return made(World(tmp_path, tiny_model))


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tiny_model):
    world = made(World(tmp_path_factory.mktemp("alone"), tiny_model))
    assert world.run().exit_code == ExitCode.OK
    return world.results()


def made(world):
    text = world.job_file.read_text()
    world.job_file.write_text(text.replace('prompt = "prompt"', 'prompt = "prompt"\nchat = false'))
    world.add_shard("a.parquet", [f"{n} " + "x" * (7 * n % 50) for n in range(ROWS)])
    return world


def run(world, *options, **fake):
    """Run `cbjob run` with the fake model; return its exit code, what it said, and its seconds."""
    started_s = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "run", str(world.job_file), *options],
        env={**os.environ, "CBJOB_FAKE": json.dumps(fake)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr, time.monotonic() - started_s


def parts(world):
    return list(world.directory.parts("a.parquet").glob("*.parquet"))


def test_a_step_that_hangs_ends_the_worker_and_a_rerun_loses_nothing(world, reference):
    # a hundred times what a step takes, also where others keep the machine busy
    limit = ("--set", "batching.max_step=3s")
    code, said, took_s = run(world, *limit, killer=KILLER, death="hang")
    assert code == ExitCode.INFRASTRUCTURE, said
    # the limit and a start, far from the ten minutes of the step
    assert took_s < 60
    error, hint = said.splitlines()
    assert re.fullmatch(
        r"error: step \d+ \(\d+ single tokens, \d+ of prompts, 0 swapped blocks; row .*\)"
        r" has taken \d+\.\d s, more than the 3\.0 s of batching\.max_step; it is in _die, .*",
        error,
    )
    assert hint.startswith("hint: run again: nothing committed is lost")
    assert error.removeprefix("error: ") in (world.folder / "run/log.txt").read_text()
    assert parts(world), "nothing was committed before"
    code, said, _ = run(world)
    assert code == ExitCode.OK, said
    assert world.results() == reference
    assert world.problems() == []
    assert world.leftovers() == []


def test_a_device_that_is_lost_is_not_waited_for_and_what_it_gave_is_saved(world, reference):
    code, said, took_s = run(world, killer=KILLER, death="lost")
    assert code == ExitCode.INFRASTRUCTURE, said
    # exit handlers wait for ten minutes
    assert took_s < 60
    assert said.splitlines() == ["error: the fake device is lost", "hint: run again"]
    # those in flight keep their tokens, those that were finished are
    assert list(world.directory.partials("a.parquet").glob("*.parquet"))
    assert parts(world)
    code, said, _ = run(world)
    assert code == ExitCode.OK, said
    assert world.results() == reference
    assert world.problems() == []
    assert world.leftovers() == []


@pytest.mark.slow
def test_a_row_that_hangs_every_time_ends_as_an_error_row(world):
    """Reruns set it apart as they do with one that kills its worker."""
    limit = ("--set", "batching.max_step=2s", "--limit", "6")
    for _ in range(20):
        code, said, _ = run(world, *limit, killer=3, death="hang")
        if code != ExitCode.INFRASTRUCTURE:
            break
    assert code == ExitCode.ROW_ERRORS, said
    statuses = [row["status"] for row in world.results()["a.parquet"]]
    assert statuses == ["ok"] * 3 + ["error"] + ["ok"] * 2
