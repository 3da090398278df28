"""Show and log the numbers while a job runs. Knows nothing of what they mean."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from jobrunner.console.stats import Snapshot, Stats, metrics_line
from jobrunner.console.view import clean_lines, plain_line, view
from jobrunner.errors import InfrastructureError

Style = Literal["auto", "rich", "plain", "none"]

REFRESH_S = 0.25
_LOGGER = logging.getLogger("cbjob")


class Console:
    """Progress of one run on `stream`, log records of "cbjob" above it, metrics in a file.

    "auto" is "rich" on a terminal and "plain" elsewhere. "none" is silent but for warnings:
    a job under cron should send mail only if something is wrong. `every_s` is the time between
    plain lines and between lines of `metrics_path`.
    """

    def __init__(
        self,
        style: Style,
        every_s: float,
        metrics_path: Path | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._style = _effective(style, self._stream)
        self._every_s = every_s
        self._clock = clock
        self._metrics = None if metrics_path is None else _Metrics(metrics_path)
        self._handler = _LogHandler(self)
        self._live = _live(self._stream) if self._style == "rich" else None
        self._refresh_due_s = clock()
        self._line_due_s = clock() + every_s

    def __enter__(self) -> Self:
        self._handler.attach(logging.WARNING if self._style == "none" else logging.INFO)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handler.detach()
        if self._live is not None:
            self._live.stop()
        if self._metrics is not None:
            self._metrics.close()

    def update(self, stats: Stats) -> None:
        """Show and log what is due; called every step, it mostly only looks at the clock."""
        now_s = self._clock()
        refresh = self._live is not None and now_s >= self._refresh_due_s
        line = now_s >= self._line_due_s
        if not refresh and not line:
            return
        snapshot = stats.snapshot(now_s)
        if refresh:
            self._refresh_due_s = now_s + REFRESH_S
            self._show(snapshot)
        if line:
            self._line_due_s = now_s + self._every_s
            if self._style == "plain":
                self._write(plain_line(snapshot))
            self._log_metrics(snapshot)

    def finish(self, stats: Stats, summary_text: str) -> None:
        """Show and log the last numbers, then the summary below them."""
        snapshot = stats.snapshot(self._clock())
        self._log_metrics(snapshot)
        if self._live is not None:
            self._show(snapshot)
            self._live.stop()
        elif self._style == "plain":
            self._write(plain_line(snapshot))
        if self._style != "none":
            self._write(summary_text)

    def _show(self, snapshot: Snapshot) -> None:
        if self._live is None:
            return
        if not self._live.is_started:
            # begins only now: while a model loads, others may draw bars of their own
            self._live.start()
            # a killed job must not leave a terminal without a cursor
            self._live.console.show_cursor(True)
        self._live.update(view(snapshot), refresh=True)

    def _write(self, line: str, style: str = "") -> None:
        if self._live is None:
            try:
                # one call per line: lines of two threads do not mix
                self._stream.write(line + "\n")
                self._stream.flush()
            except BrokenPipeError:
                # whoever read it is gone: that must not end a job of days
                self._style = "none"
        else:
            self._live.console.print(Text(line, style=style), soft_wrap=True)

    def _log_metrics(self, snapshot: Snapshot) -> None:
        if self._metrics is not None:
            self._metrics.append(snapshot)


class _Metrics:
    """The file of metrics, one JSON object a line; an earlier run's lines stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._fault(error) from error

    def append(self, snapshot: Snapshot) -> None:
        try:
            self._file.write(json.dumps(metrics_line(snapshot), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what could not be written before fails here again
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> InfrastructureError:
        return InfrastructureError(
            f"cannot write metrics to `{self._path}`: {error.strerror}",
            hint="mend the disk or change `progress.metrics`, then run the same command again",
        )


class _LogHandler(logging.Handler):
    """Writes log records above the live view."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
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
        text = clean_lines(self.format(record))
        if record.levelno >= logging.WARNING:
            self._console._write(f"{record.levelname.lower()}: {text}", style="bold yellow")
        else:
            self._console._write(text)


def _live(stream: TextIO) -> Live:
    # no markup, emoji codes or highlighting: names and messages come from data
    console = RichConsole(
        file=stream, force_terminal=True, markup=False, emoji=False, highlight=False
    )
    return Live(
        console=console,
        auto_refresh=False,
        redirect_stdout=False,  # stdout is data
        redirect_stderr=stream is sys.stderr,  # warnings of libraries come out above the view
    )


def _effective(style: Style, stream: TextIO) -> Style:
    if style != "auto":
        return style
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return "rich" if stream.isatty() and not dumb else "plain"
