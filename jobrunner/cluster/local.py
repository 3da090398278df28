"""Keep a worker process running at each place, and hear how it ended. Knows nothing of rows."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from jobrunner.cluster.places import Place
from jobrunner.cores import WORKERS_VARIABLE
from jobrunner.errors import ExitCode

# tells a worker that its parent holds the other end of its standard input: see `run_command`
SUPERVISED = "CBJOB_SUPERVISED"
# how a worker ends for which this machine has no memory: other than the rest of what
# `ExitCode.INFRASTRUCTURE` says, this may be the fault of a row, and others go on
HOST_MEMORY_CODE = 79
# ends that another start would not change
FINAL = frozenset(ExitCode) - {ExitCode.UNEXPECTED}
# so many lives in a row in which nothing was finished, or not even begun, are a crash loop: a row
# that kills its worker is found in fewer
MOST_DEATHS = 12
MOST_DEATHS_AT_START = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Line:
    """Something that a worker said on its standard error."""

    worker: int
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a worker's process. `again_in_s` is None if it is not started again.

    `crash_loop` says that it is not because it died too often.
    """

    worker: int
    pid: int
    code: int
    again_in_s: float | None = None
    crash_loop: bool = False

    @property
    def words(self) -> str:
        """How it ended, for a person."""
        if self.code == HOST_MEMORY_CODE:
            return "no memory"
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by {signal.Signals(-self.code).name}"


class _Worker:
    """One place and the process that is there, if one is."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.process: subprocess.Popen[str] | None = None
        self.code: int | None = None
        self.lives = 0
        self.start_at_s = 0.0
        self.deaths = 0
        self.deaths_at_start = 0
        self.begun = False


class Crew:
    """The workers of one command, each restarted when it dies until it ends by itself.

    `command(number, life)` is what worker `number` runs for the first time (0) or after so many
    deaths; its standard error is heard line by line. A worker that was never started counts as
    none.
    """

    def __init__(
        self,
        places: Sequence[Place],
        command: Callable[[int, int], Sequence[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = [_Worker(place) for place in places]
        self._command = command
        self._clock = clock
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._stopping = False

    @property
    def working(self) -> bool:
        """Some worker has not ended for good."""
        return any(worker.lives and worker.code is None for worker in self._workers)

    @property
    def codes(self) -> list[int]:
        """How the workers ended for good."""
        return [worker.code for worker in self._workers if worker.code is not None]

    def start(self, number: int) -> None:
        """Start a worker's process."""
        worker = self._workers[number]
        worker.begun = False
        place = worker.place
        before = os.sched_getaffinity(0)
        if place.cores is not None:
            # a child inherits them, from this thread alone
            os.sched_setaffinity(0, place.cores)
        try:
            worker.process = subprocess.Popen(
                list(self._command(number, worker.lives)),
                env={
                    **os.environ,
                    **place.environment,
                    SUPERVISED: "1",
                    WORKERS_VARIABLE: str(len(self._workers)),
                },
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # a terminal's ^C goes to this process, which passes it on, once
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)
        worker.lives += 1
        assert worker.process.stderr is not None
        hearing = (number, worker.process.stderr)
        threading.Thread(target=self._hear, args=hearing, daemon=True).start()

    def lines(self, timeout_s: float) -> Iterator[Line]:
        """What was said since the last call; waits for the first line for so long."""
        try:
            yield self._lines.get(timeout=timeout_s)
            while True:
                yield self._lines.get_nowait()
        except queue.Empty:
            return

    def begun(self, number: int, *, finished: bool) -> None:
        """Take note that a worker has begun to work, or even finished something."""
        worker = self._workers[number]
        worker.begun = True
        worker.deaths_at_start = 0
        if finished:
            worker.deaths = 0

    def look(self) -> list[Ended]:
        """Start again what is due, and name the workers that have ended since the last look."""
        ended = []
        for number, worker in enumerate(self._workers):
            if worker.code is not None or not worker.lives:
                continue
            if worker.process is None:
                if self._stopping:
                    worker.code = ExitCode.RUN_AGAIN
                elif self._clock() >= worker.start_at_s:
                    self.start(number)
            elif (code := worker.process.poll()) is not None:
                ended.append(self._ended(number, worker, code))
        return ended

    def tell(self, signum: int) -> None:
        """Pass a signal on; nobody is started again after it."""
        self._stopping = True
        for worker in self._workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.process.send_signal(signum)

    def kill(self) -> None:
        """End what still runs, at once."""
        self.tell(signal.SIGKILL)
        for worker in self._workers:
            if worker.process is not None:
                worker.process.wait()

    def _ended(self, number: int, worker: _Worker, code: int) -> Ended:
        process, worker.process = worker.process, None
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        if code in FINAL or self._stopping:
            worker.code = code if code in FINAL else ExitCode.RUN_AGAIN
            return Ended(number, process.pid, code)
        worker.deaths += 1
        worker.deaths_at_start += not worker.begun
        if worker.deaths >= MOST_DEATHS or worker.deaths_at_start >= MOST_DEATHS_AT_START:
            lacks_memory = code == HOST_MEMORY_CODE
            worker.code = ExitCode.INFRASTRUCTURE if lacks_memory else ExitCode.UNEXPECTED
            return Ended(number, process.pid, code, crash_loop=True)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (worker.deaths - 1))
        worker.start_at_s = self._clock() + pause_s
        return Ended(number, process.pid, code, pause_s)

    def _hear(self, number: int, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(Line(number, line.rstrip("\n")))


def worst(codes: Sequence[int]) -> ExitCode:
    """The exit code of a command from those of its workers.

    A worker that ends with 0 or 3 has seen that the job is complete, whoever did it: what befell
    the others does not matter then. Otherwise the worst counts.
    """
    order = (
        ExitCode.ROW_ERRORS,
        ExitCode.OK,
        ExitCode.INTERRUPTED,
        ExitCode.USAGE,
        ExitCode.TOO_MANY_ERRORS,
        ExitCode.UNEXPECTED,
        ExitCode.INFRASTRUCTURE,
        ExitCode.RUN_AGAIN,
    )
    return next(code for code in order if code in codes)
