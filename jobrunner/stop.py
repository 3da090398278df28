"""Signals, the end of a time limit, the grace time -> one flag that the loop looks at."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jobrunner.errors import ExitCode
from jobrunner.leaving import leave_at_once

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Stop:
    """The wish to stop early. `reason` names the signal, or is empty."""

    def __init__(self) -> None:
        self.reason = ""
        self._requested = threading.Event()
        self._interrupts = 0
        self._leave_at_s: float | None = None

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def request(self, reason: str) -> None:
        """Ask the loop to stop; the first reason counts."""
        self.reason = self.reason or reason
        self._requested.set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a stop is requested or the time is up; tell whether one is."""
        return self._requested.wait(timeout_s)

    @property
    def left_s(self) -> float | None:
        """The seconds until `leave_in` asks for a stop; None where it was not called."""
        return None if self._leave_at_s is None else self._leave_at_s - time.monotonic()

    def leave_in(self, seconds: float, reason: str) -> None:
        """Ask for a stop when so many seconds have passed."""
        self._leave_at_s = time.monotonic() + seconds
        if seconds <= 0:
            self.request(reason)
            return
        # a timer takes no longer wait than this
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self.request, args=(reason,))
        timer.daemon = True
        timer.start()

    @contextmanager
    def on_signals(self, grace_s: float) -> Iterator[None]:
        """Turn signals into the flag while the block runs.

        A second SIGINT raises KeyboardInterrupt at once. Work that does not end within
        `grace_s` of the first signal is cut off with exit code 75: what is committed stays
        committed, a rerun does the rest. Python lets only the main thread handle signals;
        elsewhere this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        finished = threading.Event()

        def handle(signum: int, frame: FrameType | None) -> None:
            self._interrupts += signum == signal.SIGINT
            if self._interrupts > 1:
                raise KeyboardInterrupt
            self.request(signal.Signals(signum).name)

        # Python's handlers wait while the main thread is inside a library; this pipe does not
        reader, writer = os.pipe()
        os.set_blocking(writer, False)

        def cut_off_after_grace() -> None:
            while came := os.read(reader, 1):
                if came[0] in SIGNALS and not finished.wait(grace_s):
                    _cut_off(grace_s)

        guard = threading.Thread(target=cut_off_after_grace, name="grace", daemon=True)
        guard.start()
        earlier_pipe = signal.set_wakeup_fd(writer)
        # one that nohup made ignored stays so
        heard = [signum for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
        before = {signum: signal.signal(signum, handle) for signum in heard}
        try:
            yield
        finally:
            finished.set()
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(earlier_pipe)
            os.close(writer)
            guard.join()
            os.close(reader)


def _cut_off(grace_s: float) -> None:
    leave_at_once(
        ExitCode.RUN_AGAIN,
        f"stopped: not done within the grace time of {grace_s:g} s;"
        " the same command goes on from the last checkpoint\n",
    )
