"""The styles of progress: one class each, on one stream. Knows nothing of intervals or files."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text
from tqdm import tqdm

from jobrunner.console.printable import printable_lines
from jobrunner.console.snapshot import Snapshot, metrics_line
from jobrunner.console.view import plain_line, postfix, view

Style = Literal["auto", "rich", "tqdm", "json", "plain", "off"]


class Display(Protocol):
    """What a style does with the numbers, with log records and with the end of the run."""

    #: True: the display is redrawn several times a second; False: it writes once an interval
    live: bool
    #: True: log records below warnings are not shown
    quiet: bool

    def show(self, snapshot: Snapshot) -> None:
        """Show the numbers of this moment."""

    def log(self, level: str, text: str) -> None:
        """Show a log record; `level` is a lower-case name."""

    def finish(self, snapshot: Snapshot, summary: str) -> None:
        """Show the last numbers, then the summary."""

    def close(self) -> None:
        """Leave the stream in order, also after a failure."""


def display(style: Style, stream: TextIO) -> Display:
    """The display of a style; "auto" is "rich" on a terminal and "plain" elsewhere."""
    match style:
        case "off":
            return Off(stream)
        case "json":
            return Json(stream)
        case "tqdm":
            return Bar(stream)
        case "plain":
            return Plain(stream)
        case "rich":
            return Rich(stream)
        case "auto":
            dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
            return Rich(stream) if stream.isatty() and not dumb else Plain(stream)


class Off:
    """Silent but for warnings: a job under cron should send mail only if something is wrong."""

    live = False
    quiet = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, snapshot: Snapshot) -> None:
        pass

    def log(self, level: str, text: str) -> None:
        _write_line(self._stream, _record(level, text))

    def finish(self, snapshot: Snapshot, summary: str) -> None:
        pass

    def close(self) -> None:
        pass


class Plain(Off):
    """One line an interval, for logs."""

    quiet = False

    def show(self, snapshot: Snapshot) -> None:
        _write_line(self._stream, plain_line(snapshot))

    def finish(self, snapshot: Snapshot, summary: str) -> None:
        self.show(snapshot)
        _write_line(self._stream, summary)


class Json(Off):
    """One JSON object a line, for programs: its `event` is progress, log or summary.

    A progress object has the fields of a line of metrics, the summary has them too.
    """

    quiet = False

    def show(self, snapshot: Snapshot) -> None:
        self._put("progress", metrics_line(snapshot))

    def log(self, level: str, text: str) -> None:
        self._put("log", {"level": level, "message": text})

    def finish(self, snapshot: Snapshot, summary: str) -> None:
        self._put("summary", {**metrics_line(snapshot), "text": summary})

    def _put(self, event: str, fields: dict[str, Any]) -> None:
        _write_line(self._stream, json.dumps({"event": event, **fields}, allow_nan=False))


class Bar:
    """A bar of tqdm over the rows, log records above it."""

    quiet = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # a log file does not want a line four times a second
        self.live = stream.isatty()
        self._bar: _Tqdm | None = None

    def show(self, snapshot: Snapshot) -> None:
        bar = self._bar
        if bar is None:
            # rows of earlier runs and other workers must not count as this one's speed
            before = snapshot.rows_done - snapshot.rows_this_run
            bar = self._bar = _Tqdm(
                total=snapshot.rows_total,
                initial=before,
                unit="row",
                file=self._stream,
                dynamic_ncols=True,
            )
        bar.n = snapshot.rows_done
        bar.set_postfix_str(postfix(snapshot), refresh=False)
        bar.refresh()

    def log(self, level: str, text: str) -> None:
        _Tqdm.write(_record(level, text), file=self._stream)

    def finish(self, snapshot: Snapshot, summary: str) -> None:
        self.show(snapshot)
        self.close()
        _write_line(self._stream, summary)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Tqdm(tqdm):  # type: ignore[misc]
    """Without tqdm's own thread: the console knows when to refresh."""

    monitor_interval = 0

    def __del__(self) -> None:
        """Write nothing: its display closes it, unless the stream is gone."""


class _RichConsole(RichConsole):
    """Rich's own would end the process when the reader of its stream is gone."""

    def on_broken_pipe(self) -> None:
        raise  # called while BrokenPipeError is handled


class Rich:
    """A live view of some lines at the bottom of a terminal, log records above it."""

    live = True
    quiet = False

    def __init__(self, stream: TextIO) -> None:
        # no markup, emoji codes or highlighting: names and messages come from data
        self._console = _RichConsole(
            file=stream, force_terminal=True, markup=False, emoji=False, highlight=False
        )
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,  # stdout is data
            redirect_stderr=stream is sys.stderr,  # warnings of libraries come out above the view
        )

    def show(self, snapshot: Snapshot) -> None:
        if not self._live.is_started:
            # begins only now: while a model loads, others may draw bars of their own
            self._live.start()
            # a killed job must not leave a terminal without a cursor
            self._console.show_cursor(True)
        self._live.update(view(snapshot), refresh=True)

    def log(self, level: str, text: str) -> None:
        self._print(_record(level, text), "" if level == "info" else "bold yellow")

    def finish(self, snapshot: Snapshot, summary: str) -> None:
        self.show(snapshot)
        self._live.stop()
        self._print(summary)

    def close(self) -> None:
        self._live.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


def _record(level: str, text: str) -> str:
    text = printable_lines(text)
    return text if level in ("debug", "info") else f"{level}: {text}"


def _write_line(stream: TextIO, line: str) -> None:
    # one call per line: lines of two threads do not mix
    stream.write(line + "\n")
    stream.flush()
