"""On a real Slurm: a job is preempted, comes back by itself, and loses nothing."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.commands.status import look
from jobrunner.commands.verify import find_problems
from jobrunner.data.layout import RunDirectory
from jobrunner.job import run
from jobrunner.jobfile import load_settings
from tests.slurm_cluster import need_slurm, slurm_cluster, wait_for

# a minute on a quiet machine, more on a busy one
pytestmark = pytest.mark.slow

JOB = """
[job]
name = "a \\"job\\"\\n#SBATCH --wrap=id"
[input]
path = "input"
prompt = "prompt"
[output]
path = "the run 100%j"
[model]
name = {model!r}
dtype = "float32"
threads = 1
[generation]
max_new_tokens = 60
ignore_eos = true
[batching]
max_batch_size = 4
[checkpoint]
every = "250ms"
grace = "8s"
[slurm]
partition = "low"
time = "10m"
lines = ["--comment=a 'b' #c $(exit 7)"]
"""


@pytest.fixture(scope="module")
def cluster():
    need_slurm()
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path, tiny_model):
    (tmp_path / "input").mkdir()
    table = pa.table({"prompt": [f"row {index}" for index in range(40)]})
    pq.write_table(table, tmp_path / "input" / "a.parquet")
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(model=str(tiny_model)))
    return path


def submit(cluster, job, *overrides: str) -> str:
    options = [f"--set={override}" for override in overrides]
    command = [sys.executable, "-m", "jobrunner.cli", "submit", str(job), *options]
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_preempted_job_comes_back_by_itself_and_finishes(cluster, job):
    settings = load_settings(job)
    log = settings.run_directory / "log.txt"
    number = submit(cluster, job)
    wait_for(lambda: cluster.job(number)["JobState"] == "RUNNING", "a start")
    said = cluster.job(number)
    assert (said["Requeue"], said["TimeLimit"]) == ("1", "00:10:00")
    assert "Comment=a 'b' #c $(exit 7)" in cluster.call("scontrol", "show", "job", number)
    wait_for(lambda: look(settings).rows_done, "rows that are done")
    cluster.preempt()
    wait_for(lambda: "SIGTERM: saved; " in log.read_text(), "a worker that saves and leaves")
    wait_for(lambda: look(settings).state == "finished", "the end of the job")
    wait_for(lambda: cluster.job(number)["JobState"] == "COMPLETED", "a job that ended well")
    assert cluster.job(number)["Restarts"] == "1"
    # one log for both starts, in the run directory whatever its name is
    starts = (settings.run_directory / f"slurm-{number}.log").read_text()
    assert starts.count("of 40 rows are done, ") == 2
    directory = RunDirectory(settings.run_directory, "test")
    assert list(find_problems(settings, directory)) == []
    in_peace = load_settings(job, ["output.path=peace"])
    run(in_peace)
    results = [s.run_directory / "results" / "a.parquet" for s in (settings, in_peace)]
    assert pq.read_table(results[0]).equals(pq.read_table(results[1]))
