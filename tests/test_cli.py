"""The command line answers at once, and errors are said in words with the right exit code."""

import subprocess
import sys

import pytest

from jobrunner.cli import cli, main
from jobrunner.errors import DeviceBusyError, MismatchError, TooManyErrorsError

CBJOB = [sys.executable, "-m", "jobrunner.cli"]


def cbjob(*arguments, **options):
    return subprocess.run(
        [*CBJOB, *map(str, arguments)], capture_output=True, text=True, timeout=60, **options
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['cbjob', '--help']\n"
        "from jobrunner.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'pydantic', 'rich', 'numpy', 'datasets'}\n"
        "print(sorted(heavy & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
    commands = done.stdout.partition("Commands:")[2].split("\n")
    names = [line.split()[0] for line in commands if line.startswith("  ") and line.split()]
    assert names == [
        *("check", "compare", "doctor", "init", "run"),
        *("simulate", "status", "submit", "verify"),
    ]


def test_a_wrong_setting_exits_2_with_the_problem_on_stderr(tmp_path):
    (tmp_path / "job.toml").write_text("[input]\npath = 'x'\n")
    done = cbjob("run", "job.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "`output` in `job.toml` is missing" in done.stderr


@pytest.mark.parametrize("command", ["check", "run", "status", "verify"])
def test_a_job_file_that_is_not_there_is_missed_and_the_nearest_are_named(tmp_path, command):
    for name in ("first.toml", "second.toml", "unlike-all.toml"):
        (tmp_path / name).touch()
    done = cbjob(command, tmp_path / "secnd.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no job file `{tmp_path / 'secnd.toml'}`" in done.stderr
    assert f"hint: did you mean `{tmp_path / 'second.toml'}`" in done.stderr


def test_without_any_job_file_the_way_to_begin_is_named(tmp_path):
    assert "hint: `cbjob init` writes one" in cbjob("run", tmp_path / "job.toml").stderr
    assert "hint: there is no folder" in cbjob("run", tmp_path / "x" / "job.toml").stderr


def test_init_writes_a_job_file_that_the_other_commands_take(tmp_path):
    assert cbjob("init", cwd=tmp_path).returncode == 0
    done = cbjob("status", "job.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("not begun: ")


def test_run_hands_its_options_on(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr("jobrunner.commands.run.run_command", lambda job, **o: given.update(o) or 4)
    options = ["--progress", "json", "--retry-errors", "--limit", "3", "--set", "job.seed=1"]
    code = cli.main(["run", str(tmp_path / "job.toml"), *options], standalone_mode=False)
    assert code == 4
    assert given == {
        "limit": 3,
        "overrides": ("job.seed=1",),
        "style": "json",
        "retry_errors": True,
    }


@pytest.mark.parametrize(
    ("options", "rows", "load"),
    [([], False, True), (["--rows"], True, False), (["--no-load"], False, False)],
)
def test_check_loads_the_model_unless_told_otherwise(monkeypatch, options, rows, load):
    given = {}
    monkeypatch.setattr("jobrunner.commands.check.check_command", lambda job, **o: given.update(o))
    cli.main(["check", "job.toml", *options], standalone_mode=False)
    assert (given["rows"], given["load"]) == (rows, load)


@pytest.mark.parametrize("arguments", [["run"], ["run", "a", "--limit", "0"], ["fly"]])
def test_wrong_usage_exits_2(arguments):
    assert cbjob(*arguments).returncode == 2


def test_control_characters_never_reach_the_terminal(tmp_path):
    done = cbjob("run", "\x1b[31mjob.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def test_control_characters_of_data_do_not_come_in_a_hint(monkeypatch, capsys):
    def fail(*_, **__):
        raise MismatchError("differs", hint="its columns are `\x1b[2J`,\n`\x9b`")

    monkeypatch.setattr("jobrunner.commands.run.run_command", fail)
    monkeypatch.setattr("sys.argv", ["cbjob", "run", "job.toml"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.splitlines()[1:] == [
        "hint: its columns are `\N{REPLACEMENT CHARACTER}[2J`,",
        "`\N{REPLACEMENT CHARACTER}`",
    ]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "run/x"), 74, "No space left on device"),
        (DeviceBusyError("busy", hint="wait"), 75, "hint: wait"),
        (MismatchError("differs"), 2, "differs"),
        (TooManyErrorsError("600 of 1,000 rows are errors"), 4, "600 of 1,000"),
    ],
)
def test_what_ends_a_command_gives_its_exit_code(monkeypatch, capsys, raised, code, said):
    def fail(**options):
        raise raised

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert said in capsys.readouterr().err
