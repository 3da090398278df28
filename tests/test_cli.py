"""The command line answers at once, and errors are said in words with the right exit code."""

import subprocess
import sys

import pytest

from jobrunner.cli import cli, main
from jobrunner.errors import DeviceBusyError, MismatchError

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
    assert "run" in done.stdout
    assert "verify" in done.stdout


def test_a_wrong_setting_exits_2_with_the_problem_on_stderr(tmp_path):
    (tmp_path / "job.toml").write_text("[input]\npath = 'x'\n")
    done = cbjob("run", "job.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "`output` in `job.toml` is missing" in done.stderr


@pytest.mark.parametrize("arguments", [["run"], ["run", "a", "--limit", "0"], ["fly"]])
def test_wrong_usage_exits_2(arguments):
    assert cbjob(*arguments).returncode == 2


def test_control_characters_never_reach_the_terminal(tmp_path):
    done = cbjob("run", "\x1b[31mjob.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "run/x"), 74, "No space left on device"),
        (DeviceBusyError("busy", hint="wait"), 75, "hint: wait"),
        (MismatchError("differs"), 2, "differs"),
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
