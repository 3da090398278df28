"""Every example job under jobs/ runs as it is, with a tiny model in the place of the demo model."""

import re
import shutil
from pathlib import Path

import pytest

from jobrunner.commands.verify import find_problems
from jobrunner.data.layout import RunDirectory
from jobrunner.data.results.result_files import result_suffix
from jobrunner.errors import ExitCode
from jobrunner.job import run
from jobrunner.jobfile import load_settings
from tests.object_store import s3_server

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "jobs").glob("*.toml"))
# examples that show what becomes of a row that is wrong
WITH_ERRORS = {"openai", "params"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    return folder / "jobs"


@pytest.fixture
def stored(request, jobs, name, monkeypatch):
    """The example's input in a real S3 server, where it reads from one."""
    if name != "s3":
        return
    store = request.getfixturevalue("s3")
    for path in (jobs / "data" / "gsm8k").glob("*.parquet"):
        store.put(str(path), f"bucket/gsm8k/{path.name}")


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("weed")) as store:
        yield store


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("stored")
def test_example_runs_and_verifies(jobs, tiny_model, name):
    overrides = [f'model.name="{tiny_model}"', 'progress.style="off"']
    settings = load_settings(jobs / f"{name}.toml", overrides)
    summary = run(settings)
    assert summary.exit_code == (ExitCode.ROW_ERRORS if name in WITH_ERRORS else ExitCode.OK)
    run_directory = RunDirectory(settings.run_directory, "verify", result_suffix(settings))
    assert list(find_problems(settings, run_directory)) == []


def test_every_example_is_in_the_guide():
    guide = (ROOT / "jobs" / "README.md").read_text()
    named = set(re.findall(r"\(([\w-]+)\.toml\)", guide))
    assert named == set(EXAMPLES)
