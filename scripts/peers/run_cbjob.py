"""cbjob as `cbjob run` runs it: a job file over the workload as Parquet, results on the disk.

Timed is everything from the loaded and proven weights to the merged result file: reading rows,
every step, text of the answers, committed parts, the merge. Weights are loaded anew for each run,
as a user's run does, before the clock starts.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from serving import Answered, Channel, Row, parser, read_rows, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow as pa
import pyarrow.parquet as pq

import jobrunner
from jobrunner.commands.run import share_the_cores
from jobrunner.config import Settings
from jobrunner.errors import ExitCode
from jobrunner.jobfile import load_settings

JOB = """
[input]
path = "rows.parquet"
token_ids = "prompt_token_ids"
params = "params"
[output]
path = "run"
[model]
name = {model!r}
dtype = {dtype!r}
[generation]
ignore_eos = true
[progress]
style = "off"
"""


def main() -> None:
    channel = Channel()
    options = parser()
    options.add_argument("--set", action="append", default=[])
    chosen = options.parse_args()
    share_the_cores()
    changed = list(chosen.set)
    # by default it finds by itself how many cores are its own
    if chosen.threads != len(os.sched_getaffinity(0)):
        changed.append(f"model.threads={chosen.threads}")
    rows = read_rows(chosen.workload)
    with tempfile.TemporaryDirectory(prefix="cbjob-bench-") as name:
        folder = Path(name)

        def answer(rows: Sequence[Row]) -> Answered:
            job = write_job(folder, rows, chosen.model, chosen.dtype)
            return run(load_settings(job, changed))

        config = " ".join(changed) or "defaults"
        serve(channel, rows, answer, version=jobrunner.__version__, config=config)


def write_job(folder: Path, rows: Sequence[Row], model: str, dtype: str) -> Path:
    """Write the rows and their job file; what an earlier run left goes."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    table = pa.table(
        {
            "prompt_token_ids": [row.prompt_token_ids for row in rows],
            "params": [{"max_new_tokens": row.max_tokens} for row in rows],
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    job = folder / "job.toml"
    job.write_text(JOB.format(model=model, dtype=dtype))
    return job


def run(settings: Settings) -> Answered:
    """Run the whole job; the clock starts when the engine is ready."""
    from jobrunner import job as jobs
    from jobrunner.opening import Job, load_engine
    from jobrunner.records import Engine

    gc.collect()
    started_s = 0.0

    def open_engine(job: Job) -> Engine:
        nonlocal started_s
        engine = load_engine(job)
        started_s = time.perf_counter()
        return engine

    summary = jobs.run(settings, open_engine=open_engine)
    wall_s = time.perf_counter() - started_s
    if summary.exit_code != ExitCode.OK:
        raise SystemExit(f"the job ended with {summary.exit_code!r}: {summary.tally}")
    (results,) = summary.results.rglob("*.parquet")
    lengths = pq.read_table(results, columns=["output_tokens"])["output_tokens"].to_pylist()
    return Answered(wall_s, lengths)


if __name__ == "__main__":
    main()
