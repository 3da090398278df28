"""Whole commands with several workers: real processes, the fake model, one console."""

import json
import os
import signal
import subprocess
import time

import pytest

from jobrunner.errors import ExitCode
from tests.fake_cbjob import COMMAND
from tests.world import World

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores"
)
SHARDS = {"a.parquet": 90, "b.parquet": 60}
TWO = ("--set", "workers.count=2")


def add_shards(world):
    text = world.job_file.read_text()
    world.job_file.write_text(text.replace('prompt = "prompt"', 'prompt = "prompt"\nchat = false'))
    for name, rows in SHARDS.items():
        world.add_shard(name, [f"{name} {n} " + "x" * (7 * n % 50) for n in range(rows)])
    return world


@pytest.fixture
def world(tmp_path, tiny_model):
    return add_shards(World(tmp_path, tiny_model))


@pytest.fixture(scope="session")
def reference(tmp_path_factory, tiny_model):
    world = add_shards(World(tmp_path_factory.mktemp("alone"), tiny_model))
    assert world.run().exit_code == ExitCode.OK
    return world.results()


def start(world, *options, fake=None, **more):
    """Start `cbjob run` with the fake model."""
    environment = {**os.environ, "CBJOB_FAKE": json.dumps(fake or {})}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.Popen(
        [*COMMAND, "run", str(world.job_file), *options],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def finish(process):
    """Wait for a command; return its exit code and what it said."""
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def await_rows(world):
    """Wait until every worker of the crew has begun."""
    status = world.directory.status
    while len(list(status.glob("*.json"))) < 2:
        time.sleep(0.02)


def test_two_workers_do_a_job_with_one_console_and_without_torch(world, reference):
    fake = {"step_s": 0.005}
    code, said = finish(start(world, *TWO, "--progress", "plain", fake=fake))
    assert code == ExitCode.OK, said
    assert world.results() == reference
    assert world.problems() == []
    assert world.leftovers() == []
    assert said.count("generation: max_new_tokens 12") == 1
    assert said.count("finished: 150 of 150 rows, 150 of them in this run") == 1
    log = (world.folder / "run/log.txt").read_text().splitlines()
    assert len({line.split()[2] for line in log}) == 2


def test_row_errors_give_exit_code_3_and_a_wrong_job_2(world):
    world.add_shard("c.parquet", ["x", None])
    code, said = finish(start(world, *TWO))
    assert code == ExitCode.ROW_ERRORS, said
    code, said = finish(start(world, *TWO, "--set", "generation.max_new_tokens=3"))
    assert code == ExitCode.USAGE
    assert said.count("error: ") == 1, said


def test_error_rows_run_again_with_several_workers(world):
    world.add_shard("c.parquet", ["x", None])
    assert finish(start(world, *TWO))[0] == ExitCode.ROW_ERRORS
    code, said = finish(start(world, *TWO, "--retry-errors", "--progress", "plain"))
    assert code == ExitCode.ROW_ERRORS, said
    assert "error rows that run again: 1" in said
    assert "1 of them in this run" in said


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_command_stops_all_workers_and_the_next_run_goes_on(
    world, reference, signum
):
    command = start(world, *TWO, fake={"step_s": 0.05})
    await_rows(world)
    command.send_signal(signum)
    code, said = finish(command)
    assert code == ExitCode.RUN_AGAIN, said
    # all have left in order: nothing is claimed
    assert not [path for path in world.directory.claims.rglob("*.json") if path.is_file()]
    assert finish(start(world, *TWO))[0] == ExitCode.OK
    assert world.results() == reference
    assert world.problems() == []


def test_workers_stop_when_the_command_is_killed(world, reference):
    command = start(world, *TWO, fake={"step_s": 0.05}, start_new_session=True)
    await_rows(world)
    command.kill()
    command.wait()
    deadline_s = time.monotonic() + 30
    while [path for path in world.directory.claims.rglob("*.json") if path.is_file()]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert finish(start(world, *TWO))[0] == ExitCode.OK
    assert world.results() == reference


def test_a_killed_worker_is_started_again(world, reference):
    command = start(world, *TWO, "--progress", "plain", fake={"step_s": 0.02})
    await_rows(world)
    [victim, _] = sorted(world.directory.status.glob("*.json"))
    os.kill(json.loads(victim.read_text())["pid"], signal.SIGKILL)
    code, said = finish(command)
    assert code == ExitCode.OK, said
    assert "died (killed by SIGKILL): it starts again in 0.5 s" in said
    assert world.results() == reference
    assert world.problems() == []
    assert world.leftovers() == []


def test_case_H_the_number_of_workers_changes_between_runs(world, reference):
    for options in (TWO, (), TWO):
        command = start(world, *options, fake={"step_s": 0.05})
        time.sleep(2.5)
        command.send_signal(signal.SIGTERM)
        finish(command)
    assert finish(start(world))[0] == ExitCode.OK
    assert world.results() == reference
    assert world.problems() == []


@pytest.mark.parametrize("death", ["SIGSEGV", "raise", "memory"])
def test_a_row_that_kills_its_worker_three_times_becomes_an_error_row(world, reference, death):
    fake = {"killer": 83, "death": death}
    options = (*TWO, "--progress", "plain", "--set", "checkpoint.part_rows=3")
    code, said = finish(start(world, *options, fake=fake))
    assert code == ExitCode.ROW_ERRORS, said
    deaths = said.count("it starts again in")
    # two workers may have begun the row before either died
    assert deaths in (3, 4), said
    [wrong] = [row for rows in world.results().values() for row in rows if row["status"] != "ok"]
    assert (wrong["row"], wrong["error_kind"]) == (83, "internal")
    assert wrong["error"] == f"row 83 of `a.parquet`: its worker died {deaths} times while it ran"
    others = {s: [r for r in rows if r != wrong] for s, rows in world.results().items()}
    expected = {s: [r for r in rows if r["id"] != wrong["id"]] for s, rows in reference.items()}
    assert others == expected
    assert world.problems() == []
    assert world.leftovers() == []
    # once its fault is mended it can be tried again
    assert finish(start(world, "--retry-errors"))[0] == ExitCode.OK
    assert world.results() == reference


def test_a_worker_that_dies_by_itself_before_any_row_is_given_up_with_a_clear_error(world):
    code, said = finish(start(world, *TWO, "--progress", "plain", fake={"killer": "start"}))
    assert code == ExitCode.UNEXPECTED, said
    assert "again and again without finishing a row" in said


def test_workers_that_never_have_memory_are_given_up_with_74_and_advice(world):
    fake = {"killer": "start", "death": "memory"}
    code, said = finish(start(world, *TWO, "--progress", "plain", fake=fake))
    assert code == ExitCode.INFRASTRUCTURE, said
    assert "died (no memory): it starts again in 0.5 s" in said
    assert "again and again without finishing a row, at last by no memory" in said
    assert "this machine has no more memory: Unable to allocate 9.3 GiB" in said
    assert said.count("lower `batching.kv_memory`") == 1


def test_one_worker_of_its_own_ends_with_74_where_it_has_no_memory(world):
    code, said = finish(start(world, fake={"killer": 83, "death": "memory"}))
    assert code == ExitCode.INFRASTRUCTURE, said
