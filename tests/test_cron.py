"""cron starts a job with absolute paths and nothing else, again and again, finished or not."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobrunner.data.claims import (
    Claims,
    Identity,
    _start_ticks,
    device_name,
    holding_device,
)
from jobrunner.errors import DeviceBusyError, ExitCode, MismatchError
from jobrunner.finished import finished_progress
from jobrunner.job import run
from tests.world import World, fake_engine

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "jobs" / "CLUSTER.md").read_text()


@pytest.fixture
def world(tmp_path, tiny_model):
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", ["one", "two", None])
    return world


@pytest.fixture
def finished(world):
    world.run()
    assert world.directory.finished_file.exists()
    return world


def crontab_command() -> str:
    """What follows the five fields of time in the example of the guide."""
    [line] = re.findall(r"^\*/10 \* \* \* \* (.*)$", GUIDE, re.MULTILINE)
    return line


def as_cron(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a line as cron does: with sh, in the home directory, with hardly an environment."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "SHELL": "/bin/sh"}
    return subprocess.run(
        ["sh", "-c", command], cwd=home, env=environment, capture_output=True, text=True
    )


def test_the_line_of_the_guide_runs_a_job_under_cron(world):
    program = world.folder / "bin" / "cbjob"
    program.parent.mkdir()
    # the script that pip makes, of this source tree
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from jobrunner.cli import main\nmain()\n"
    )
    program.chmod(0o755)
    line = crontab_command()
    line = re.sub(r"\S+/cbjob", str(program), line)
    line = re.sub(r"\S+\.toml", str(world.job_file), line)
    done = as_cron(line, world.folder)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.ROW_ERRORS, "", "")
    assert world.problems() == []
    again = as_cron(line, world.folder)
    assert (again.returncode, again.stdout, again.stderr) == (ExitCode.ROW_ERRORS, "", "")


def test_a_finished_job_returns_without_importing_torch(finished):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from jobrunner.commands.run import run_command\n"
        f"code = run_command(Path({str(finished.job_file)!r}), limit=None, overrides=(),"
        " style='plain')\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'datasets'}\n"
        "print(int(code), sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{int(ExitCode.ROW_ERRORS)} []\n"
    assert "every row is done: " in done.stderr


def test_what_a_finished_job_returns_is_what_it_returned_at_its_end(finished):
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.folder.rglob("*"))
    summary = finished.run()
    assert (summary.exit_code, summary.rows) == (ExitCode.ROW_ERRORS, 3)
    assert summary.tally.errors == {"null_prompt": 1}
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.folder.rglob("*")) == before


def test_a_start_after_the_end_sweeps_up_what_a_worker_left_that_died_later(finished):
    run = replace(finished.directory, worker=ended_worker())
    said = run.status / f"{run.worker}.json"
    left = run.idle / run.worker, run.temporary / f"{run.worker}.0", run.cuts("a.parquet") / "5"
    for path in (said, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    finished.run()
    assert finished.leftovers() == []
    # a finished job can still be asked for its status
    assert said.exists()
    assert finished.problems() == []


def ended_worker():
    """The name of a worker of this host that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return replace(Identity.of_this_process("cpu"), pid=process.pid).worker


@pytest.mark.parametrize("free", ["batching.max_batch_size=3", 'progress.style="off"'])
def test_settings_that_decide_nothing_may_differ(finished, free):
    assert finished_progress(finished.directory, finished.settings(free)) is not None


@pytest.mark.parametrize(
    "change", ["generation.max_new_tokens=5", "job.seed=1", 'input.system="x"', "limit"]
)
def test_other_settings_are_compared_as_a_whole(finished, change):
    options = {"limit": 2} if change == "limit" else {}
    overrides = () if change == "limit" else (change,)
    settings = finished.settings(*overrides, **options)
    assert finished_progress(finished.directory, settings) is None


def test_a_finished_job_whose_input_grew_is_refused_as_ever(finished):
    finished.add_shard("b.parquet", ["three"])
    assert finished_progress(finished.directory, finished.settings()) is None
    with pytest.raises(MismatchError, match=r"b\.parquet"):
        finished.run()


def test_a_finished_job_whose_template_changed_is_refused_as_ever(world):
    template = world.folder / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    option = f'input.chat_template="{template}"'
    world.run(option)
    assert finished_progress(world.directory, world.settings(option)) is not None
    template.write_text("{{ messages[0].content }}!")
    assert finished_progress(world.directory, world.settings(option)) is None
    with pytest.raises(MismatchError):
        world.run(option)
    template.unlink()
    assert finished_progress(world.directory, world.settings(option)) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_note_is_no_note(finished, content):
    finished.directory.finished_file.write_text(content)
    assert finished_progress(finished.directory, finished.settings()) is None
    assert finished.run().exit_code == ExitCode.ROW_ERRORS
    assert finished_progress(finished.directory, finished.settings()) is not None


def test_a_job_that_is_not_finished_is_not_said_to_be(world):
    world.run_and_stop(1, batch=1)
    assert not world.directory.finished_file.exists()
    assert finished_progress(world.directory, world.settings()) is None


def test_the_errors_of_a_finished_job_can_still_run_again(finished):
    assert finished.run("errors.max_rate=1.0").exit_code == ExitCode.ROW_ERRORS
    generated = finished.tokens_generated
    retried = run(finished.settings(), retry_errors=True, open_engine=fake_engine())
    assert retried.tally.errors == {"null_prompt": 1}
    assert finished.tokens_generated == generated
    assert finished.problems() == []


@pytest.fixture
def held(world):
    """The device of this process, held by another that lives."""
    sleeper = subprocess.Popen(["sleep", "60"])
    me = Identity.of_this_process(device_name("cpu"))
    other = replace(me, pid=sleeper.pid, started=_start_ticks(sleeper.pid), token="00")
    world.directory.create()
    with holding_device(Claims(world.directory.claims, world.directory.temporary, other), other):
        yield world
    sleeper.kill()
    sleeper.wait()


def test_a_second_start_is_refused_before_anything_is_opened(held):
    held.folder.joinpath("input").rename(held.folder / "gone")
    with pytest.raises(DeviceBusyError):
        held.run()


@pytest.mark.parametrize("style", ["off", "plain"])
def test_a_second_start_exits_75_and_says_nothing_where_progress_is_off(held, style):
    command = [sys.executable, "-m", "jobrunner.cli", "run", str(held.job_file)]
    done = subprocess.run([*command, "--progress", style], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ExitCode.RUN_AGAIN, "")
    assert ("already runs on" in done.stderr) is (style != "off")
    if style == "off":
        assert done.stderr == ""
