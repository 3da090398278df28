"""Show and log the numbers while a job runs. Knows nothing of what they mean."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TextIO

from jobrunner.console.displays import Display, Style, display
from jobrunner.console.files import Metrics, StatusFile
from jobrunner.console.machine import MachineLimits
from jobrunner.console.snapshot import Snapshot

REFRESH_S = 0.25
_LOGGER = logging.getLogger("cbjob")


class Numbers(Protocol):
    """What is shown: the numbers of one worker, or of several together."""

    def snapshot(self, now_s: float) -> Snapshot:
        """The numbers at this moment."""

    def ended(self) -> None:
        """Take note that nothing runs any more."""


class Console:
    """Progress of one run on `stream`, log records of "cbjob" above it, numbers in files.

    `every_s` is the time between plain lines, between lines of `metrics_path` and between
    writings of `status_path`, which is written at the first update too and holds `identity`
    beside the numbers. `clock` is that of the stats, `unix_clock` tells the time of day.
    """

    def __init__(
        self,
        style: Style,
        every_s: float,
        metrics_path: Path | None = None,
        *,
        status_path: Path | None = None,
        identity: Mapping[str, object] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._screen = _Screen(display(style, sys.stderr if stream is None else stream))
        self._every_s = every_s
        self._clock = clock
        self._unix_clock = unix_clock
        self._metrics = None if metrics_path is None else Metrics(metrics_path)
        self._status = None
        if status_path is not None:
            self._status = StatusFile(status_path, identity or {}, every_s)
        self._handler = _LogHandler(self._screen)
        now_s = clock()
        self._refresh_due_s = now_s
        self._status_due_s = now_s
        self._line_due_s = now_s + every_s

    def __enter__(self) -> Self:
        self._handler.attach(logging.WARNING if self._screen.quiet else logging.INFO)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handler.detach()
        self._screen.close()
        if self._metrics is not None:
            self._metrics.close()

    def measured(self, limits: MachineLimits) -> None:
        """Take note, for the metrics, of what the machine gives."""
        if self._metrics is not None:
            self._metrics.measured(limits)

    def update(self, stats: Numbers) -> None:
        """Show and log what is due; called every step, it mostly only looks at the clock."""
        now_s = self._clock()
        refresh = self._screen.live and now_s >= self._refresh_due_s
        line = now_s >= self._line_due_s
        status = self._status is not None and now_s >= self._status_due_s
        if not refresh and not line and not status:
            return
        snapshot = stats.snapshot(now_s)
        if refresh or (line and not self._screen.live):
            self._refresh_due_s = now_s + REFRESH_S
            self._screen.show(snapshot)
        if line:
            self._line_due_s = now_s + self._every_s
            self._log_metrics(snapshot)
        if status:
            self._status_due_s = self._line_due_s
            self._write_status(snapshot)

    def finish(self, stats: Numbers, summary_text: str) -> None:
        """Show and log the last numbers, then the summary below them; nothing runs any more."""
        stats.ended()
        snapshot = stats.snapshot(self._clock())
        self._log_metrics(snapshot)
        self._write_status(snapshot)
        self._screen.finish(snapshot, summary_text)

    def say(self, level: str, text: str) -> None:
        """Show what another process said, as a log record of this one would be."""
        if not self._screen.quiet or level not in ("debug", "info"):
            self._screen.log(level, text)

    def _log_metrics(self, snapshot: Snapshot) -> None:
        if self._metrics is not None:
            self._metrics.append(snapshot)

    def _write_status(self, snapshot: Snapshot) -> None:
        if self._status is not None:
            self._status.write(snapshot, self._unix_clock())


class _Screen:
    """A display until it cannot be written any more: that must not end a job of days."""

    def __init__(self, shown: Display) -> None:
        self._shown: Display | None = shown
        self.quiet = shown.quiet

    @property
    def live(self) -> bool:
        return self._shown is not None and self._shown.live

    def show(self, snapshot: Snapshot) -> None:
        self._do(lambda shown: shown.show(snapshot))

    def log(self, level: str, text: str) -> None:
        self._do(lambda shown: shown.log(level, text))

    def finish(self, snapshot: Snapshot, summary: str) -> None:
        self._do(lambda shown: shown.finish(snapshot, summary))

    def close(self) -> None:
        self._do(lambda shown: shown.close())

    def _do(self, act: Callable[[Display], None]) -> None:
        if self._shown is None:
            return
        try:
            act(self._shown)
        except OSError:
            # a pipe nobody reads, a terminal that was closed, a log on a full disk
            self._shown = None


class _LogHandler(logging.Handler):
    """Writes log records above the numbers."""

    def __init__(self, screen: _Screen) -> None:
        super().__init__()
        self._screen = screen
        self._level_before = logging.NOTSET

    def attach(self, level: int) -> None:
        self.setLevel(level)
        self._level_before = _LOGGER.level
        if _LOGGER.level == logging.NOTSET:
            _LOGGER.setLevel(logging.INFO)
        _LOGGER.addHandler(self)

    def detach(self) -> None:
        _LOGGER.removeHandler(self)
        _LOGGER.setLevel(self._level_before)

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.log(record.levelname.lower(), self.format(record))
