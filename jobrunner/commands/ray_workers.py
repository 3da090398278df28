"""Run a job with workers on the machines of a Ray cluster: one command, one exit code."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from jobrunner.cluster.ray import Ended, RayCrew, connect, find_share
from jobrunner.commands.run import share_the_cores
from jobrunner.commands.status import look, text_lines
from jobrunner.config import Settings
from jobrunner.console.live import Console
from jobrunner.data.claims import TASK_VARIABLE
from jobrunner.errors import ExitCode, JobError
from jobrunner.jobfile import load_settings
from jobrunner.stop import Stop

log = logging.getLogger("cbjob")

# what saw that the job is complete
COMPLETE = (ExitCode.OK, ExitCode.ROW_ERRORS)
# workers save within their grace time; Ray takes a moment to tell them
MORE_GRACE_S = 5.0


class RayWorker:
    """A worker as an actor: the same loop as `cbjob run`, told to stop by a call."""

    def __init__(self, number: int, job: str, limit: int | None, overrides: Sequence[str]) -> None:
        if not os.environ.get("CUDA_VISIBLE_DEVICES"):
            # Ray counts cores and binds nobody to them: the workers of a machine share all
            os.environ[TASK_VARIABLE] = f"ray-{number}"
        self._settings = load_settings(Path(job), overrides, limit, "off")
        self._stop = Stop()

    def work(self, retry_errors: bool) -> Ended:
        """Share the job until nothing is left, or until `stop`."""
        share_the_cores()
        from jobrunner.job import run

        try:
            done = run(self._settings, retry_errors=retry_errors, stop=self._stop)
        except JobError as error:
            return Ended(error.exit_code, str(error), error.hint)
        except OSError as error:
            return Ended(ExitCode.INFRASTRUCTURE, str(error), "mend it, then run it again")
        return Ended(done.exit_code)

    def stop(self, reason: str) -> None:
        self._stop.request(reason)


def run_on_ray(
    settings: Settings,
    job: Path,
    limit: int | None,
    overrides: Sequence[str],
    *,
    retry_errors: bool = False,
    stop: Stop | None = None,
) -> int:
    """Run the job on the Ray cluster; return the exit code.

    Ends as soon as one worker has seen that the job is complete: one whose machine is gone, and
    that Ray finds no place for, is not waited for.
    """
    connect()
    threads, device = settings.model.threads, settings.model.device
    count = settings.workers.count
    share = find_share(
        gpu=None if device == "auto" else device == "cuda",
        count=None if count == "auto" else count,
        cores=None if threads == "auto" else threads,
    )
    crew = RayCrew(RayWorker, (str(job.absolute()), limit, tuple(overrides)), share)
    stop = stop or Stop()
    grace_s = settings.checkpoint.grace + MORE_GRACE_S
    shown = settings.progress
    with stop.on_signals(grace_s + MORE_GRACE_S), Console(shown.style, shown.every):
        each = f"{share.gpus} GPU" if share.gpus else f"{share.cores} cores"
        log.info("workers on Ray: %d, each with %s", share.count, each)
        crew.start(retry_errors=retry_errors)
        try:
            return _work(crew, settings, stop, grace_s)
        finally:
            crew.kill()


def _work(crew: RayCrew, settings: Settings, stop: Stop, grace_s: float) -> int:
    ended: list[Ended] = []
    told_at_s: float | None = None
    said_at_s = time.monotonic()
    while crew.working:
        for one in crew.wait(timeout_s=0.5):
            ended.append(one)
            if one.message:
                log.error("a worker ended: %s; hint: %s", one.message, one.hint)
        if any(one.code in COMPLETE for one in ended):
            break
        now_s = time.monotonic()
        if stop.requested and told_at_s is None:
            log.info("%s: the workers save and stop", stop.reason)
            crew.stop(stop.reason)
            told_at_s = now_s
        if told_at_s is not None and now_s - told_at_s > grace_s:
            break
        if now_s - said_at_s > settings.progress.every:
            said_at_s = now_s
            log.info("%s", _said(settings))
    log.info("%s", _said(settings))
    codes = [one.code for one in ended]
    return next((c for c in codes if c in COMPLETE), max(codes, default=ExitCode.RUN_AGAIN))


def _said(settings: Settings) -> str:
    status = look(settings)
    # the state, the rows, the errors, the speed
    wanted = ("rows ", "errors ", "speed ")
    lines = [" ".join(line.split()) for line in text_lines(status)]
    return "; ".join([status.state, *(line for line in lines if line.startswith(wanted))])
