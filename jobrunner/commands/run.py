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
    share_the_cores()
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
    stop = Stop()
    with stop.on_signals(settings.checkpoint.grace):
        if supervised:
            _stop_without_parent()
        # imported late: a mistake in the settings is said, and a signal heard, before that
        from jobrunner.job import run

        return run(settings, retry_errors=retry_errors, stop=stop).exit_code


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


def share_the_cores() -> None:
    """Let idle threads sleep instead of spin, unless the user says otherwise.

    One other busy process on a machine makes spinning threads slow each other down tenfold.
    OpenMP reads this when torch is imported; tokenizers must not start threads beside it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
