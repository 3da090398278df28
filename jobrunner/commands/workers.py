"""Run a job with several workers on this machine: one command, one console, one exit code."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobrunner.cluster.local import Crew, Ended, worst
from jobrunner.cluster.places import Place
from jobrunner.config import Settings
from jobrunner.console.live import Console
from jobrunner.console.total import Total
from jobrunner.console.view import summary
from jobrunner.data.layout import RunDirectory
from jobrunner.data.results.result_files import result_suffix
from jobrunner.data.suspects import note_crash
from jobrunner.errors import ExitCode
from jobrunner.stop import Stop

log = logging.getLogger("cbjob")

# how a worker's process begins; the options of `cbjob run` follow
PROGRAM: tuple[str, ...] = (sys.executable, "-m", "jobrunner.cli", "run")
# how often workers say their numbers at the least, and how often this process looks at them
SAID_EVERY_S = 1.0
LOOK_EVERY_S = 0.1
# workers cut themselves off at the end of their grace time
MORE_GRACE_S = 5.0
# what workers have said that is not said again when another says it
MOST_REMEMBERED = 10_000


def run_workers(
    settings: Settings, places: Sequence[Place], options: Sequence[str], *, retry_errors: bool
) -> int:
    """Run the job at all `places`; return the exit code. `options` say which job it is.

    Error rows are made to run again by the first worker, before the others begin.
    """
    stop = Stop()
    own = _own_options(settings)

    def command(number: int, life: int) -> list[str]:
        retry = ["--retry-errors"] if retry_errors and number == life == 0 else []
        return [*PROGRAM, *options, *own, *retry]

    crew = Crew(places, command)
    with stop.on_signals(settings.checkpoint.grace + MORE_GRACE_S), _console(settings) as console:
        directory = RunDirectory(settings.run_directory, worker="crew")
        shift = _Shift(crew, places, console, directory)
        try:
            shift.work(stop, first_alone=retry_errors)
        except KeyboardInterrupt:
            # a second ^C: the workers heard of the first
            crew.tell(signal.SIGINT)
            shift.wait(MORE_GRACE_S)
            raise
        finally:
            crew.kill()
        shift.finish(settings)
    return worst(crew.codes)


def _own_options(settings: Settings) -> list[str]:
    every_s = min(SAID_EVERY_S, settings.progress.every)
    return ["--progress", "json", "--set", f'progress.every="{every_s:g}s"']


def _console(settings: Settings) -> Console:
    shown = settings.progress
    return Console(shown.style, shown.every)


class _Shift:
    """The workers of one command from their start to their end, and what is shown of them."""

    def __init__(
        self, crew: Crew, places: Sequence[Place], console: Console, directory: RunDirectory
    ) -> None:
        self._directory = directory
        self._crew = crew
        self._places = places
        self._console = console
        self._total = Total()
        self._said: set[tuple[str, str]] = set()
        self._finished: dict[int, int] = {}
        self._oom_kills = _oom_kills()

    def work(self, stop: Stop, *, first_alone: bool) -> None:
        """Start the workers and stay until all have ended; the first may have to begin alone."""
        crew, told = self._crew, False
        log.info("workers: %s", ", ".join(place.name for place in self._places))
        crew.start(0)
        waiting = list(range(1, len(self._places)))
        while crew.working:
            if not stop.requested and (self._total.known or not first_alone):
                while waiting:
                    crew.start(waiting.pop(0))
            self._turn()
            if stop.requested and not told:
                told = True
                log.info("%s: the workers save and stop", stop.reason)
                crew.tell(signal.Signals[stop.reason])
            if self._total.known:
                self._console.update(self._total)

    def wait(self, timeout_s: float) -> None:
        """Hear the workers out for so long."""
        deadline_s = time.monotonic() + timeout_s
        while self._crew.working and time.monotonic() < deadline_s:
            self._turn()

    def finish(self, settings: Settings) -> None:
        """Show the last numbers and the summary."""
        self._hear_out()
        if not self._total.known:
            return
        self._total.ended()
        results = settings.run_directory / "results"
        parquet = result_suffix(settings) == ".parquet"
        said = summary(self._total.snapshot(time.monotonic()), results, parquet=parquet)
        self._console.finish(self._total, said)

    def _turn(self) -> None:
        self._hear_out()
        for ended in self._crew.look():
            # its last words first
            self._hear_out()
            self._tell_end(ended)

    def _hear_out(self) -> None:
        for line in self._crew.lines(LOOK_EVERY_S):
            event = _event(line.text)
            if event is None:
                self._say(*_level(line.text), line.worker)
            elif event["event"] == "log":
                self._say(event["level"], event["message"], line.worker)
            else:
                self._count(line.worker, event)

    def _count(self, worker: int, event: Mapping[str, Any]) -> None:
        self._total.hear(worker, event, time.monotonic())
        rows = event["rows_this_run"]
        self._crew.begun(worker, finished=rows > self._finished.get(worker, 0))
        self._finished[worker] = rows

    def _say(self, level: str, text: str, worker: int) -> None:
        """Say what a worker said, but not again what another has said."""
        if (level, text) in self._said:
            return
        if len(self._said) < MOST_REMEMBERED:
            self._said.add((level, text))
        named = text if level in ("info", "hint") else f"{self._places[worker].name}: {text}"
        self._console.say(level, named)

    def _tell_end(self, ended: Ended) -> None:
        self._total.left(ended.worker)
        self._finished.pop(ended.worker, None)
        place = self._places[ended.worker].name
        killed_elsewhere = ended.code == -signal.SIGKILL and _oom_kills() == self._oom_kills
        self._oom_kills = _oom_kills()
        if ended.code < 0 and not killed_elsewhere:
            note_crash(self._directory, ended.pid)
        if ended.again_in_s is not None:
            log.warning(
                "the worker on %s died (%s): it starts again in %g s",
                place,
                ended.words,
                ended.again_in_s,
            )
        elif ended.crash_loop:
            log.error(
                "the worker on %s died again and again without finishing a row, at last by %s:"
                " it is not started again",
                place,
                ended.words,
            )
        elif ended.code in (ExitCode.USAGE, ExitCode.TOO_MANY_ERRORS):
            # it would be the same for the others
            self._crew.tell(signal.SIGTERM)


def _oom_kills() -> int | None:
    """How many processes the kernel has killed for want of memory; None where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except FileNotFoundError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _event(text: str) -> dict[str, Any] | None:
    """What a worker said in the form of its console, if it is that."""
    if not text.startswith('{"event": '):
        return None
    try:
        event = json.loads(text)
    except ValueError:
        # cut off where its process died
        return None
    return event if isinstance(event, dict) else None


def _level(text: str) -> tuple[str, str]:
    """Split a line as the command line says errors; anything else is a warning."""
    level, colon, rest = text.partition(": ")
    return (level, rest) if colon and level in ("error", "hint", "warning") else ("warning", text)
