"""Every command of the README runs, with a tiny model in the place of the demo model."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.dataset as ds
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("   #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory, tiny_model):
    """A folder with the example jobs, and a cache in which the demo model is the tiny one."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    demo = folder / "cache/cbjob/models/smollm2-135m-instruct"
    shutil.copytree(tiny_model, demo)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    words = shlex.split(command)
    program = {
        "cbjob": [sys.executable, "-m", "jobrunner.cli"],
        "python": [sys.executable],
    }[words[0]]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100"}
    return subprocess.run(
        [*program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_readme_has_commands():
    assert "cbjob run jobs/quickstart.toml" in COMMANDS
    assert any(command.startswith("python -c") for command in COMMANDS)


def test_every_command_of_the_readme_runs(clone):
    for command in COMMANDS:
        if command.startswith("scripts/"):
            assert os.access(ROOT / command, os.X_OK), command
            continue
        if command == "source .venv/bin/activate":
            # the tests' own environment stands for it
            continue
        done = run(command, clone)
        assert done.returncode == 0, (command, done.stderr)
    results = ds.dataset(clone / "runs/quickstart/results")
    assert results.count_rows() == 64
    assert ds.dataset(clone / "runs/first/results").count_rows() == 8


def test_the_command_that_shows_results_at_the_end_of_a_run_works(clone):
    done = run("cbjob run jobs/quickstart.toml --limit 2 --set output.path=../runs/two", clone)
    [look] = re.findall(r"^ *look +(.*)$", done.stderr, re.MULTILINE)
    shown = subprocess.run(look, shell=True, capture_output=True, text=True, check=True)
    assert shown.stdout.count("'status': 'ok'") == 2


def test_the_job_in_the_readme_is_the_quickstart():
    [text] = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    said, real = tomllib.loads(text), tomllib.loads((ROOT / "jobs/quickstart.toml").read_text())
    for table, keys in said.items():
        assert keys.items() <= real[table].items()


def test_every_key_that_can_be_set_is_in_the_readme():
    from jobrunner.config import TABLES, Settings

    for table in TABLES:
        [line] = re.findall(rf"^\| `\[{table}\]` \|(.*)$", README, re.MULTILINE)
        keys = Settings.model_fields[table].annotation.model_fields
        missing = [key for key in keys if f"`{key}`" not in line]
        assert not missing, (table, missing)
