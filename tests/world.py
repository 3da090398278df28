"""A small job in a folder of its own: its input, its runs, and how it can be killed."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner import job as jobs
from jobrunner.commands.verify import find_problems
from jobrunner.config import Settings
from jobrunner.data.layout import RunDirectory
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.plan import Plan
from jobrunner.engine.policies import Policy
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.watchdog import step_limit, watchdog
from jobrunner.job import Summary
from jobrunner.jobfile import load_settings
from jobrunner.opening import Job
from jobrunner.records import Step
from jobrunner.stop import Stop
from tests.fakes import FakeRunner

JOB = """
[input]
path = "input"
prompt = "prompt"
keep = ["id"]
[output]
path = "run"
[model]
name = {model!r}
dtype = "float32"
[generation]
max_new_tokens = 12
[progress]
style = "off"
[checkpoint]
every = "1h"
part_rows = 10
"""
ANSWERS = range(3, 100)
END = 2


def output_length(prompt: Sequence[int]) -> int:
    """Outputs of 1 to 20 tokens: some end by themselves, some are cut at 12."""
    return 1 + sum(prompt) % 20


def fake_engine(
    *,
    batch: int = 8,
    blocks: int = 64,
    lookahead: int = 16,
    policy: Policy | None = None,
    before_step: Callable[[], None] | None = None,
    before_plan: Callable[[Plan], None] | None = None,
) -> Callable[[Job], Engine]:
    """An engine whose model is a hash of the context."""

    def open_engine(job: Job) -> Engine:
        limits = Limits(max_batch_size=batch, token_budget=64, chunk_size=32, lookahead=lookahead)
        runner = FakeRunner(
            8,
            vocabulary=ANSWERS,
            stop_id=END,
            output_length=output_length,
            before_step=before_step,
            before_plan=before_plan,
        )
        scheduler = Scheduler(Blocks(blocks, 8), limits, job.prompts.open_text, policy=policy)
        limit = step_limit(job.settings.batching.max_step, "cpu")
        return Engine(scheduler, runner, watchdog=watchdog(limit, ahead=False))

    return open_engine


class World:
    """A job over Parquet shards, run with the fake model."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.job_file = folder / "job.toml"
        self.job_file.write_text(JOB.format(model=str(model)))
        self.tokens_file = folder / "tokens"

    def add_shard(self, name: str, prompts: Iterable[str | None], type_: Any = None) -> None:
        prompts = list(prompts)
        path = self.folder / "input" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = pa.array([f"{name}-{index}" for index in range(len(prompts))], pa.string())
        table = pa.table({"id": ids, "prompt": pa.array(prompts, type_ or pa.string())})
        # as a careful producer replaces a file: never half of it in sight
        pq.write_table(table, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def settings(self, *overrides: str, limit: int | None = None) -> Settings:
        return load_settings(self.job_file, overrides, limit)

    def run(
        self,
        *overrides: str,
        limit: int | None = None,
        observe: Callable[[Step], None] = lambda step: None,
        stop: Stop | None = None,
        **engine: Any,
    ) -> Summary:
        """Run the job in this process with the fake model; tokens are counted in a file."""

        def counted(step: Step) -> None:
            with self.tokens_file.open("a") as file:
                file.write(f"{step.output_tokens}\n")
            observe(step)

        return jobs.run(
            self.settings(*overrides, limit=limit),
            open_engine=fake_engine(**engine),
            observe=counted,
            stop=stop,
        )

    def run_and_stop(self, after_steps: int, *overrides: str, **engine: Any) -> Summary:
        """Run, and ask to stop after so many steps."""
        stop = Stop()
        seen = 0

        def observe(step: Step) -> None:
            nonlocal seen
            seen += not step.idle
            if seen >= after_steps:
                stop.request("test")

        return self.run(*overrides, observe=observe, stop=stop, **engine)

    def start_worker(self, device: str, *overrides: str, **engine: Any) -> int:
        """Start a worker on a device of its own in a child process; return its process id."""
        pid = os.fork()
        if pid == 0:
            try:
                jobs.device_name = lambda _: device  # type: ignore[attr-defined, assignment]
                os._exit(self.run(*overrides, **engine).exit_code)
            except BaseException:  # noqa: BLE001 - a child must never return into the tests
                traceback.print_exc()
                os._exit(99)
        return pid

    def fork(self, prepare: Callable[[], None], **options: Any) -> int:
        """Run the job in a child process that `prepare` arranges to kill; return how it ended.

        A number below zero is the signal that ended it.
        """
        pid = os.fork()
        if pid == 0:
            try:
                prepare()
                os._exit(self.run(**options).exit_code)
            except BaseException:  # noqa: BLE001 - a child must never return into the tests
                traceback.print_exc()
                os._exit(99)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @property
    def tokens_generated(self) -> int:
        """All tokens that all runs so far have generated."""
        return sum(map(int, self.tokens_file.read_text().split()))

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.folder / "run", worker="test-0-00")

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """All rows of all result files, by shard."""
        folder = self.directory.results
        return {
            path.relative_to(folder).as_posix(): pq.read_table(path).to_pylist()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    def problems(self, *overrides: str, limit: int | None = None) -> list[str]:
        """What `cbjob verify` finds."""
        return list(find_problems(self.settings(*overrides, limit=limit), self.directory))

    def leftovers(self) -> list[str]:
        """Files of state that a finished job should not have."""
        state = self.directory.state
        found = [path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()]
        # a finished job can still be asked for its status, and JSON lines have no footer
        stays = ("job.json", "finished.json", "status/", "tallies/")
        return [name for name in found if not name.startswith(stays)]


def kill() -> None:
    """End this process at once, as the out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
