"""`cbjob run`: read the settings, run the job, tell how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from jobrunner.cluster.local import SUPERVISED
from jobrunner.cluster.places import Place, find_places, visible_gpus
from jobrunner.cluster.slurm import seconds_left
from jobrunner.cores import granted_cores
from jobrunner.errors import DeviceBusyError
from jobrunner.jobfile import load_settings
from jobrunner.stop import Stop


def run_command(
    job: Path,
    *,
    limit: int | None,
    overrides: Sequence[str],
    style: str | None,
    retry_errors: bool = False,
) -> int:
    """Run the job and return its exit code."""
    settings = load_settings(job, overrides, limit, style)
    if settings.workers.engine == "ray":
        from jobrunner.commands.ray_workers import run_on_ray

        return run_on_ray(settings, job, limit, overrides, retry_errors=retry_errors)
    supervised = SUPERVISED in os.environ
    if not supervised:
        cores = frozenset(os.sched_getaffinity(0))
        places = find_places(settings.workers, settings.model.device, visible_gpus(), cores)
        if len(places) > 1:
            from jobrunner.commands.workers import run_workers

            return run_workers(
                settings, places, _options(job, limit, overrides), retry_errors=retry_errors
            )
        _take(places[0])
    # in each worker: it is granted less than the process that starts several
    share_the_cores()
    stop = Stop()
    with stop.on_signals(settings.checkpoint.grace):
        if supervised:
            _stop_without_parent()
        leave_in_time(stop, settings.checkpoint.grace)
        # imported late: a mistake in the settings is said, and a signal heard, before that
        from jobrunner.job import run

        try:
            return run(settings, retry_errors=retry_errors, stop=stop).exit_code
        except DeviceBusyError as busy:
            if settings.progress.style != "off":
                raise
            # cron mails every word, and this happens whenever a job takes longer than its interval
            return busy.exit_code


def leave_in_time(stop: Stop, grace_s: float) -> None:
    """Leave a Slurm job so early that there is time to save before it is ended."""
    left_s = seconds_left()
    if left_s is not None:
        stop.leave_in(left_s - grace_s, "the Slurm job ends soon")


def _options(job: Path, limit: int | None, overrides: Sequence[str]) -> list[str]:
    """The options that say which job it is."""
    limited = [] if limit is None else ["--limit", str(limit)]
    return [str(job), *limited, *(word for item in overrides for word in ("--set", item))]


def _take(place: Place) -> None:
    """Use the devices of a place in this process."""
    os.environ.update(place.environment)
    if place.cores is not None:
        os.sched_setaffinity(0, place.cores)


def _stop_without_parent() -> None:
    """Stop as at a signal once the process that started this worker is gone: its pipe ends then."""

    def wait() -> None:
        # never written to
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


# Turns that a thread spins before it sleeps, some microseconds: to be woken for each of the many
# small products of a step takes longer. A step of 64 decodes on two cores takes 73 ms with 0, 63
# with 1,000 and 61 with 10,000; beside one busy process 103, 115 and over 200.
_SPINS = "1000"


def share_the_cores() -> None:
    """Let idle threads sleep soon instead of spin, and use no more than the cores that are ours.

    One other busy process on a machine makes spinning threads slow each other down tenfold.
    OpenMP reads this when torch is imported; tokenizers must not start threads beside it.
    What the user has set stays.
    """
    cores = granted_cores()
    if cores < len(os.sched_getaffinity(0)):
        # else it is what torch takes by itself
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
