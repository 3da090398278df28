"""The sbatch script says what was asked for and nothing else; the end of a job is known."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobrunner.cli import cli
from jobrunner.cluster.slurm import job_script, seconds_left, submit
from jobrunner.commands.run import leave_in_time
from jobrunner.commands.submit import run_words
from jobrunner.config import SLURM_OWN, SlurmTable
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.jobfile import load_settings
from jobrunner.stop import Stop

GOLDEN = Path(__file__).parent.parent / "golden"

JOB = """
[input]
path = "in"
prompt = "p"
[output]
path = "run"
[model]
name = "demo"
[slurm]
"""
# what a value may try: to end its line, its word, its quotes, the option before it
HOSTILE = [
    "\n#SBATCH --wrap=id",
    "$(id)",
    "`id`",
    "'; id; '",
    '" id "',
    "\\",
    "a b",
    "#",
    "\r",
    "é",
]


def script(table: dict | None = None, run="/jobs/run", name="job", command=("cbjob", "run")) -> str:
    return job_script(
        SlurmTable.model_validate(table or {}),
        name=name,
        run_directory=Path(run),
        grace_s=30.0,
        command=command,
    )


def options(text: str) -> list[str]:
    """The #SBATCH lines as sbatch reads them: between quotes everything but a backslash is text."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    for line in lines:
        assert "\\" not in line
        assert line[0] == line[-1] in "'\"" or not set(line) & set(" '\"#")
        assert line[0] not in "'\"" or line[0] not in line[1:-1]
    return [line[1:-1] if line[0] in "'\"" else line for line in lines]


def test_the_script_can_be_read():
    table = {"partition": "low", "account": "nlp", "gres": "gpu:a100:1", "time": "4h", "cpus": 8}
    table |= {"array": 4, "lines": ["--constraint=a100|h100", "--mail-type=END"]}
    text = script(
        table, command=["/venv/bin/python", "-m", "jobrunner.cli", "run", "/jobs/a b.toml"]
    )
    assert text == (GOLDEN / "slurm.sh").read_text()


def test_bash_finds_no_fault_with_the_script():
    done = subprocess.run(
        ["bash", "-n"], input=script(), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_tasks_are_labelled_in_the_log_and_an_array_has_a_log_for_each():
    assert "srun --kill-on-bad-exit=0 --label" in script({"tasks": 2})
    assert "--ntasks=2" in options(script({"tasks": 2}))
    assert "--output=/jobs/run/slurm-%j.log" in options(script({"array": 1}))
    assert "--output=/jobs/run/slurm-%A_%a.log" in options(script({"array": 2}))


def test_without_requeue_the_exit_code_is_left_to_slurm():
    assert "scontrol" in script()
    assert "scontrol" not in script({"requeue": False})
    assert script({"requeue": False}).endswith('exit "$code"\n')


@pytest.mark.parametrize("key", ["partition", "account", "gres"])
@pytest.mark.parametrize("value", [*HOSTILE, ""])
def test_a_hostile_value_is_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=rf"`slurm\.{key}`"):
        settings(tmp_path, {key: value})


@pytest.mark.parametrize(
    "line",
    [
        "constraint=a",
        "-C a",
        "--",
        "--a=b\n#SBATCH --c=d",
        "--a=\x1b[2J",
        "--wrap=id",
        "--wra=id",
        "--a=\\",
        "--a='\"",
    ]
    + [f"--{name}=x" for name in SLURM_OWN],
)
def test_a_line_that_is_no_option_or_decides_what_runs_is_refused(tmp_path, line):
    with pytest.raises(ConfigError, match=r"`slurm\.lines`"):
        settings(tmp_path, {"lines": [line]})


def test_a_time_that_leaves_none_to_work_is_refused(tmp_path):
    assert settings(tmp_path, {"time": "150s"}).slurm.time == 150
    with pytest.raises(ConfigError, match=r"`slurm\.time` of 149 s leaves no time"):
        settings(tmp_path, {"time": "149s"})


def settings(folder: Path, table: dict):
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    (folder / "job.toml").write_text(JOB + lines)
    return load_settings(folder / "job.toml")


@given(name=st.text(), folder=st.text("abc %'\"#$`é\\", max_size=8), word=st.text(max_size=8))
@example(name="\n#SBATCH --wrap=id", folder="a %j ' #", word="'; id; '")
def test_names_folders_and_options_stay_one_word_each(name, folder, word):
    command = ["cbjob", "run", "/" + word.replace("\0", ""), f"--set=job.name={name}"]
    command[-1] = command[-1].replace("\0", "")
    if "\\" in folder or {"'", '"'} <= set(folder):
        with pytest.raises(ConfigError, match="cannot be told to write a log"):
            script(run=f"/x{folder}", name=name, command=command)
        return
    text = script(run=f"/x{folder}", name=name, command=command)
    head, _, body = text.partition("\n\n")
    assert [line for line in head.splitlines() if not line.startswith("#")] == []
    found = options(head)
    assert [option.partition("=")[0] for option in found] == [
        *("--job-name", "--ntasks", "--output", "--requeue", "--open-mode", "--signal"),
    ]
    wanted = str(Path(f"/x{folder}")).replace("%", "%%")
    assert f"--output={wanted}/slurm-%j.log" in found
    srun = body.partition("\n")[2].partition("\ncode=$?\n")[0]
    assert shlex.split(srun) == ["srun", "--kill-on-bad-exit=0", *command]


def test_the_command_runs_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = run_words(Path("job.toml"), 3, ["job.seed=1"])
    assert words[:3] == [sys.executable, "-m", "jobrunner.cli"]
    assert words[3:] == ["run", str(tmp_path / "job.toml"), "--limit=3", "--set=job.seed=1"]


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A program in the place of one of Slurm's, which notes what it is given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(program: str, lines: str) -> Path:
        path = folder / program
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/given\n{lines}\n')
        path.chmod(0o755)
        return tmp_path / "given"

    return install


def test_submit_writes_the_script_and_prints_the_number(tmp_path, sbatch, capsys):
    given = sbatch("sbatch", "echo '17;cluster'")
    settings(tmp_path, {"partition": "low"})
    code = cli.main(["submit", str(tmp_path / "job.toml")], standalone_mode=False)
    assert (code, capsys.readouterr().out) == (0, "17\n")
    written = tmp_path / "run" / "slurm.sh"
    assert given.read_text() == f"--parsable {written}\n"
    assert cli.main(["submit", str(tmp_path / "job.toml"), "--print"], standalone_mode=False) == 0
    assert capsys.readouterr().out == written.read_text()


def test_print_writes_nothing(tmp_path, capsys):
    settings(tmp_path, {})
    cli.main(["submit", str(tmp_path / "job.toml"), "--print"], standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_without_slurm_submit_says_so_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings(tmp_path, {})
    with pytest.raises(ConfigError, match="no `sbatch`"):
        cli.main(["submit", str(tmp_path / "job.toml")], standalone_mode=False)
    assert not (tmp_path / "run").exists()


def test_what_sbatch_says_is_told(tmp_path, sbatch):
    sbatch("sbatch", "echo 'invalid partition specified: x' >&2; exit 1")
    with pytest.raises(InfrastructureError, match="invalid partition specified: x"):
        submit(tmp_path / "slurm.sh")


def test_outside_of_slurm_there_is_no_end():
    assert seconds_left({}) is None


def test_the_end_is_taken_from_the_environment_where_slurm_says_it(sbatch):
    given = sbatch("scontrol", "exit 1")
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)}
    assert 90 < seconds_left(environ | {"PATH": os.environ["PATH"]}) <= 100
    assert not given.exists()


def test_the_end_is_asked_for_where_slurm_does_not_say_it(sbatch):
    end = int(time.time()) + 100
    given = sbatch("scontrol", f'[ "$SLURM_TIME_FORMAT" = %s ] && echo "X=1 EndTime={end} Y=2"')
    assert 90 < seconds_left({"SLURM_JOB_ID": "12", "PATH": os.environ["PATH"]}) <= 100
    assert given.read_text() == "--oneliner show job 12\n"


@pytest.mark.parametrize("lines", ["exit 1", "echo EndTime=Unknown", "echo"])
def test_an_end_that_cannot_be_known_is_none(sbatch, lines):
    sbatch("scontrol", lines)
    assert seconds_left({"SLURM_JOB_ID": "12", "PATH": os.environ["PATH"]}) is None


def test_a_worker_in_slurm_leaves_its_grace_time_before_the_end(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    for left_s, requested in ((100, False), (20, True), (-5, True)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left_s))
        stop = Stop()
        leave_in_time(stop, grace_s=30.0)
        assert stop.requested is requested
        assert stop.left_s == pytest.approx(left_s - 30, abs=2)
    assert stop.reason == "the Slurm job ends soon"
